"""The demo model in FP8 behind a real `vllm serve`: what a user does, over HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.integrations.demo import demo_texts
from octavo.integrations.hub import load_tokenizer
from octavo.workflows.evaluate import EvaluateConfig, evaluate
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
from tests.serve.checkpoints import Scheme, logprobs_of, oracle
from tests.serve.server import VllmServer

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(1200)]

# A 135M model is undecided about many things: asked for the capital of France, BF16 prefers the answer with Paris by
# 0.1 nats. These answers lead by more than FP8 moves them.
QUESTIONS = {
    "What is the capital of Japan?": "Tokyo",
    "What is the opposite of hot?": "cold",
    "Who wrote Romeo and Juliet?": "Shakespeare",
}
WINDOWS, TOKENS = 4, 500


@pytest.fixture(scope="module")
def checkpoint(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `octavo quantize` writes with its defaults: one scale per channel, compressed-tensors, a scale per token."""
    out = tmp_path_factory.mktemp("http") / "channel"
    quantize_checkpoint(QuantizeConfig(model=str(demo_model), out=out))
    return out


@pytest.fixture(scope="module")
def server(vllm_python: Path, checkpoint: Path) -> Iterator[VllmServer]:
    with VllmServer(vllm_python, checkpoint, checkpoint.parent / "vllm.log") as running:
        yield running


@pytest.mark.parametrize("question", QUESTIONS)
def test_sensible_answers(server: VllmServer, question: str) -> None:
    answer = server.chat(question)
    assert QUESTIONS[question].lower() in answer.lower(), answer


def test_completion_is_greedy_and_repeatable(server: VllmServer) -> None:
    first, second = (server.complete("The capital of France is", max_tokens=8)["text"] for _ in range(2))
    assert first == second and "Paris" in first


def test_perplexity(server: VllmServer, checkpoint: Path, demo_model: Path, tmp_path: Path) -> None:
    """Four texts of 500 tokens: within 1 % of `octavo eval` on the same folder, in the arithmetic of the engine.

    One text is too short to tell: two correct W8A8 engines round an activation apart here and there, which moves the
    perplexity of 500 tokens by about 1 %. Beside it: 6 % of BF16, 3 % of an independent emulation in float32.
    """
    text = "\n".join(demo_texts("eval"))
    (tmp_path / "text.txt").write_text(text)
    ids = load_tokenizer(demo_model)(text).input_ids[: WINDOWS * TOKENS]
    windows = [ids[start : start + TOKENS] for start in range(0, len(ids), TOKENS)]
    sizes = {"data": str(tmp_path / "text.txt"), "tokens": WINDOWS * TOKENS, "context": TOKENS}
    evaluated = evaluate(EvaluateConfig(model=str(checkpoint), dtype="bfloat16", **sizes)).perplexity
    served = perplexity([p for window in windows for p in server.prompt_logprobs(window)])
    found = []
    for scheme in (None, Scheme("channel", "token")):
        model = oracle(demo_model, scheme)
        found.append(perplexity([p for window in windows for p in logprobs_of(model, window)]))
    bf16, emulated = found
    print(f"BF16 {bf16:.3f}, emulated {emulated:.3f}, evaluated {evaluated:.3f}, served {served:.3f}")
    assert served == pytest.approx(evaluated, rel=0.01)
    assert served == pytest.approx(bf16, rel=0.06)
    assert served == pytest.approx(emulated, rel=0.03)


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-torch.tensor(logprobs, dtype=torch.float64).mean().item())
