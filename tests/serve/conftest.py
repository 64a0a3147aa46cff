"""The other environment's interpreter, and the models that vLLM gets to see."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import Vllm


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """OCTAVO_TEST_VLLM. Unset: skip. Set to what does not exist: an error, or `make serve-test` would test nothing."""
    given = os.environ.get("OCTAVO_TEST_VLLM")
    if not given:
        pytest.skip("OCTAVO_TEST_VLLM does not name the Python of a vLLM environment; `make serve-test` makes one")
    python = Path(given)
    if not python.is_file():
        raise FileNotFoundError(f"OCTAVO_TEST_VLLM={given} is no interpreter: run scripts/vllm_env.sh")
    return python


@pytest.fixture(scope="session")
def vllm(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """vLLM with the reference kernels, started once for all tests."""
    process = Vllm(vllm_python, tmp_path_factory.mktemp("vllm") / "log")
    yield process
    process.end()


@pytest.fixture(scope="session")
def aligned_llama(save_tiny: Callable[..., Path]) -> Path:
    """Two layers whose linears are multiples of 128; weights large enough for answers that differ from each other."""
    return save_tiny(llama_config(heads=4, kv_heads=2), "aligned")


@pytest.fixture(scope="session")
def misaligned_llama(save_tiny: Callable[..., Path]) -> Path:
    """As above, with q, k and v of 192 rows: one block and a half each, inside vLLM's fused tensor."""
    return save_tiny(llama_config(heads=3, kv_heads=3), "misaligned")


def llama_config(heads: int, kv_heads: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=264,
        num_hidden_layers=2,
        hidden_size=64 * heads,
        intermediate_size=384,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
