"""verify's static verdict is what a real vLLM does with the same folder: boots and computes what was stored, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.workflows.verify import VerifyConfig, verify
from tests.serve.checkpoints import logprobs_of
from tests.serve.client import Vllm
from tests.serve.verdicts import CASES, Case, loud

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

IDS = torch.randint(4, 128, (48,), generator=torch.Generator().manual_seed(1)).tolist()
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 2**24}
# Distance from the 16-bit model in units of its own spread. FP8 costs 0.03 to 0.14, nonsense starts at 0.5.
NONSENSE = 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("verdicts")
    return {name: case.write(root / str(number)) for number, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def answers(vllm: Vllm, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    settings = {"prompt": IDS, "max_tokens": 2, "engine": ENGINE}
    return {name: vllm.ask("probe", folder=folder, **settings) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[tuple[str, Any], ...], torch.Tensor]:
    """What the 16-bit models answer."""
    from transformers import AutoModelForCausalLM

    root, found = tmp_path_factory.mktemp("truths"), {}
    for number, model in enumerate({case.model for case in CASES.values()}):
        folder = loud(**dict(model)).write(root / str(number))
        found[model] = torch.tensor(logprobs_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), IDS))
    return found


def serves(answer: dict[str, Any], truth: torch.Tensor) -> bool:
    if not answer["loads"] or answer["error"] or None in answer["prompt_logprobs"]:
        return False
    return bool((torch.tensor(answer["prompt_logprobs"]) - truth).abs().mean() < NONSENSE * truth.std())


@pytest.mark.parametrize("name", CASES)
def test_verdict_is_what_vllm_does(
    name: str,
    folders: dict[str, Path],
    answers: dict[str, dict[str, Any]],
    truths: dict[tuple[tuple[str, Any], ...], torch.Tensor],
) -> None:
    case: Case = CASES[name]
    assert serves(answers[name], truths[case.model]) == case.good, answers[name]["error"] or "it boots"
    report = verify(VerifyConfig(folder=folders[name], engine="vllm", engine_version="0.32.0", gpu="sm90"))
    assert (report.verdict != "error") == case.good, report.findings
