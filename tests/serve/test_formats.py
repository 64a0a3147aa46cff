"""What vLLM makes of every FP8 format, against an FP32 emulation of the same arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.workflows.rules.probing import probe_vllm
from tests.serve.checkpoints import SCHEMES, Scheme, drop_tensor, input_ranges, logprobs_of, oracle, write_checkpoint
from tests.serve.client import Vllm, vllm_variables

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

IDS = torch.randint(4, 264, (48,), generator=torch.Generator().manual_seed(1)).tolist()
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 2**26}
BLOCK = Scheme("block", "group", native=True)
CHANNEL = Scheme("channel", "token")
DOWN = "model.layers.1.mlp.down_proj.weight_scale_inv"
KEY = "model.layers.0.self_attn.k_proj.weight_scale_inv"


@dataclass
class Models:
    """What every folder answered, by the folder's name; input_scales of the static schemes."""

    folders: dict[str, Path]
    input_scales: dict[str, float]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)


def request(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "prompt": IDS, "max_tokens": 8, "engine": ENGINE, **more}


@pytest.fixture(scope="module")
def models(vllm: Vllm, aligned_llama: Path, misaligned_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """All formats and all broken folders."""
    root = tmp_path_factory.mktemp("formats")
    scales = input_ranges(oracle(aligned_llama, None), IDS)
    folders = {s.name: write_checkpoint(aligned_llama, root / s.name, s, scales) for s in SCHEMES}
    folders["no down_proj scale"] = drop_tensor(folders[BLOCK.name], root / "no-down", DOWN)
    folders["no k_proj scale"] = drop_tensor(folders[BLOCK.name], root / "no-k", KEY)
    folders["misaligned"] = write_checkpoint(misaligned_llama, root / "misaligned", BLOCK)
    requests = {name: request(folder) for name, folder in folders.items()}
    requests |= {
        f"{name}, tracked": request(folders[name], track_weights=True)
        for name in (BLOCK.name, "no down_proj scale", "no k_proj scale")
    }
    return Models(folders, scales, {name: vllm.ask("probe", **asked) for name, asked in requests.items()})


def distance(answer: dict[str, Any], expected: list[float]) -> float:
    """Mean absolute difference of the prompt's log-probabilities; infinite if any is NaN."""
    got = answer["prompt_logprobs"]
    return float("inf") if None in got else sum(differences(got, expected)) / len(expected)


def differences(got: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_format_loads_and_computes_what_it_says(models: Models, aligned_llama: Path, scheme: Scheme) -> None:
    """Equal to the emulation until the first activation falls on the other side of a rounding boundary, near it later.

    FP32 sums in another order differ by 1e-6, and about one activation in 50,000 is that close to a boundary. What
    is quantized differently altogether is off by as much as FP8 is from BF16.
    """
    answer = models.answers[scheme.name]
    assert answer["loads"], answer["error"]
    assert answer["kernels"] and all(k.startswith("OctavoReference") for k in answer["kernels"]), answer["kernels"]
    emulated = oracle(aligned_llama, scheme, models.input_scales)
    expected = logprobs_of(emulated, IDS)
    effect = distance(answer, logprobs_of(oracle(aligned_llama, None), IDS))
    assert min(differences(answer["prompt_logprobs"], expected)) < 1e-3
    assert distance(answer, expected) < 0.4 * effect
    with torch.inference_mode():
        ranking = emulated(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)
    assert ranking.max() - ranking[answer["tokens"][0]] < 0.2, "greedy decoding took an improbable token"


def test_block_layouts_agree(models: Models) -> None:
    """weight_scale_inv and weight_scale name the same thing."""
    native, ct = models.answers[BLOCK.name], models.answers["ct-block-group"]
    assert native["prompt_logprobs"] == ct["prompt_logprobs"] and native["tokens"] == ct["tokens"]


@pytest.mark.parametrize("name", ["no down_proj scale", "no k_proj scale"])
def test_missing_scale_boots_and_talks_nonsense(models: Models, aligned_llama: Path, name: str) -> None:
    """vLLM fills the hole with uninitialized memory and says nothing: verify must call it an error."""
    answer = models.answers[name]
    assert answer["loads"] and not answer["error"], answer["error"]
    assert distance(answer, logprobs_of(oracle(aligned_llama, BLOCK), IDS)) > 0.5


def test_vllm_tracker_sees_only_some_missing_scales(models: Models) -> None:
    """A scale of a fused tensor counts as loaded once a sibling's is: the tracker does not replace our own check."""
    assert models.answers[f"{BLOCK.name}, tracked"]["loads"]
    caught = models.answers["no down_proj scale, tracked"]
    assert not caught["loads"] and DOWN in caught["error"]
    assert models.answers["no k_proj scale, tracked"]["loads"]


def test_misaligned_fused_blocks_are_silently_wrong(models: Models, misaligned_llama: Path) -> None:
    """q, k and v whose rows are no multiple of 128 read each other's scales: verify must call it an error."""
    answer = models.answers["misaligned"]
    assert answer["loads"] and not answer["error"], answer["error"]
    assert distance(answer, logprobs_of(oracle(misaligned_llama, BLOCK), IDS)) > 0.05


def test_shipped_probe_without_our_kernels(models: Models, vllm_python: Path) -> None:
    """As a user has it: the script in a process of its own, vLLM as it comes. The same numbers for the one format that
    stock vLLM runs on any CPU, and its tracker misses nothing there.
    """
    folder, variables = str(models.folders[CHANNEL.name]), vllm_variables(reference_kernels=False)
    arguments = ["--token-ids", ",".join(map(str, IDS)), "--max-tokens", "2", "--track-weights"]
    stock: dict[str, Any] = probe_vllm(
        vllm_python, folder, *arguments, "--engine", json.dumps(ENGINE), extra_env=variables
    )
    assert stock["loads"] and stock["version"], stock["error"]
    assert len(stock["tokens"]) == 2 and stock["kernels"] == ["ChannelWiseTorchFP8ScaledMMLinearKernel"]
    assert distance(stock, models.answers[CHANNEL.name]["prompt_logprobs"]) < 0.1
