"""The demo model in FP8 behind a real `vllm serve`: what a user does, over HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.serve.checkpoints import Scheme, logprobs_of, oracle, write_checkpoint
from tests.serve.server import VllmServer

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(1200)]

# A 135M model is undecided about many things: asked for the capital of France, BF16 prefers the answer with Paris by
# 0.1 nats. These answers lead by more than FP8 moves them.
QUESTIONS = {
    "What is the capital of Japan?": "Tokyo",
    "What is the opposite of hot?": "cold",
    "Who wrote Romeo and Juliet?": "Shakespeare",
}
TOKENS = 500


@pytest.fixture(scope="module")
def server(vllm_python: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    root = tmp_path_factory.mktemp("http")
    folder = write_checkpoint(demo_model, root / "channel", Scheme("channel", "token"))
    with VllmServer(vllm_python, folder, root / "vllm.log") as running:
        yield running


@pytest.mark.parametrize("question", QUESTIONS)
def test_sensible_answers(server: VllmServer, question: str) -> None:
    answer = server.chat(question)
    assert QUESTIONS[question].lower() in answer.lower(), answer


def test_completion_is_greedy_and_repeatable(server: VllmServer) -> None:
    first, second = (server.complete("The capital of France is", max_tokens=8)["text"] for _ in range(2))
    assert first == second and "Paris" in first


def test_perplexity(server: VllmServer, demo_model: Path) -> None:
    """On 500 tokens of real text: within 6 % of BF16, and within 3 % of an emulation of the same FP8 arithmetic.

    Measured: 16.51, 16.90 and 17.07. The served model also rounds to BF16 between the linears.
    """
    from transformers import AutoTokenizer

    from octavo.integrations.demo import demo_texts

    ids = AutoTokenizer.from_pretrained(demo_model)("\n".join(demo_texts("eval")[:4])).input_ids[:TOKENS]
    assert len(ids) == TOKENS
    served = perplexity(server.prompt_logprobs(ids))
    bf16 = perplexity(logprobs_of(oracle(demo_model, None), ids))
    emulated = perplexity(logprobs_of(oracle(demo_model, Scheme("channel", "token")), ids))
    print(f"perplexity: BF16 {bf16:.3f}, FP8 emulated {emulated:.3f}, FP8 served {served:.3f}")
    assert served == pytest.approx(bf16, rel=0.06)
    assert served == pytest.approx(emulated, rel=0.03)


def test_server_is_gone_afterwards(vllm_python: Path, tmp_path: Path) -> None:
    """A folder that cannot be served: a clear error within the time limit, and no process left."""
    (tmp_path / "config.json").write_text("{}")
    server = VllmServer(vllm_python, tmp_path, tmp_path / "vllm.log")
    with pytest.raises(AssertionError, match="ended while starting"):
        server.__enter__()
    assert server.process.poll() is not None


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-torch.tensor(logprobs, dtype=torch.float64).mean().item())
