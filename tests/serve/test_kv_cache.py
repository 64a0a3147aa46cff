"""An FP8 KV cache in a real vLLM, with the scales that our checkpoints store, against our own emulation of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.integrations.kv_cache import cached_logits
from octavo.integrations.measuring import attention_names, logits, stored_names
from octavo.integrations.transformers import load
from octavo.modules.kv_cache import Float8KVWriter
from octavo.store.kv_scales import stored_kv_scales
from octavo.store.tensors import Checkpoint
from octavo.workflows.calibrate import CalibrateConfig, calibrate
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
from tests.serve.client import run_vllm

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

IDS = torch.randint(4, 264, (48,), generator=torch.Generator().manual_seed(2))
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 2**26}
# cache dtype given to the engine; None: what the checkpoint declares
CASES = {"declared": None, "scales not used": "float32", "e4m3": "fp8_e4m3"}


@dataclass
class Served:
    folder: Path
    answers: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def served(vllm_python: Path, aligned_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("kv")
    (root / "text.txt").write_text("The five boxing wizards jump quickly over the lazy dog. " * 40)
    common = {"model": str(aligned_llama), "data": str(root / "text.txt")}
    calibrate(CalibrateConfig(**common, out=root / "scales.json", samples=8, context=64))
    settings = {"activation": "none", "kv_cache": "fp8", "scales": root / "scales.json"}
    quantize_checkpoint(QuantizeConfig(model=str(aligned_llama), out=root / "out", **settings))
    requests = []
    for dtype in CASES.values():
        engine = {**ENGINE, **({"kv_cache_dtype": dtype} if dtype else {})}
        requests.append({"folder": str(root / "out"), "prompt": IDS.tolist(), "max_tokens": 4, "engine": engine})
    return Served(root / "out", dict(zip(CASES, run_vllm(vllm_python, requests), strict=True)))


def emulated(folder: Path, fp8: bool) -> list[float]:
    model, checkpoint = load(folder, dtype=torch.float32, activation="none").eval(), Checkpoint.open(folder)
    names = attention_names(model, stored_names(model, checkpoint))
    scales = {layer: scale for layer, name in names.items() if (scale := stored_kv_scales(checkpoint, name))}
    assert len(scales) == 2
    found = cached_logits(model, IDS, Float8KVWriter(scales=scales), False) if fp8 else logits(model, IDS)
    return found[:-1].log_softmax(-1).gather(1, IDS[1:, None])[:, 0].tolist()


def distance(got: list[float], expected: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(got, expected, strict=True)) / len(expected)


@pytest.mark.parametrize("name", CASES)
def test_cache_is_what_we_emulate(served: Served, name: str) -> None:
    """The tie of a rounding boundary apart, vLLM's cache holds the same codes: nearer to it than FP8 is to 16 bit."""
    answer, fp8 = served.answers[name], name != "scales not used"
    assert answer["loads"], answer["error"]
    effect = distance(emulated(served.folder, True), emulated(served.folder, False))
    assert effect > 1e-3
    assert distance(answer["prompt_logprobs"], emulated(served.folder, fp8)) < 0.25 * effect
