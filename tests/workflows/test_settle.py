"""Checkpointing `auto`: the planner's account against the memory of a GPU that is not here."""

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.workflows.finetune import FinetuneConfig
from octavo.workflows.training import settle
from octavo.workflows.training.settle import choose_checkpointing

GIB = 1 << 30
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(free, held): what CUDA says is free, and what torch's allocator holds already."""

    def have(free, held):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(held * GIB))

    return have


def config(folder, **more):
    settings = {"model": str(folder), "out": folder / "run", "data": "demo", "context": 512}
    return FinetuneConfig(**{**settings, **more})


def test_none_where_it_fits_else_full(gpu, tiny_llama):
    for free, held, want in ((70, 0.1, "none"), (0.1, 70, "none"), (0.01, 0.01, "full")):
        gpu(free, held)
        mode, why = choose_checkpointing(config(tiny_llama), tiny_llama, CUDA)
        assert mode == want and why.endswith(f"{free + held:.1f} GiB free"), (free, held, mode, why)


def test_more_tokens_no_longer_fit(gpu, tiny_llama):
    gpu(2, 0)
    modes = [choose_checkpointing(config(tiny_llama, micro_batch=n), tiny_llama, CUDA)[0] for n in (1, 4096)]
    assert modes == ["none", "full"]


def test_what_the_planner_does_not_know_is_recomputed(gpu, tiny_llama, monkeypatch):
    gpu(70, 0)

    def unknown(*args):
        raise ConfigError("model x: packed weights")

    monkeypatch.setattr(settle, "read_model", unknown)
    mode, why = choose_checkpointing(config(tiny_llama), tiny_llama, CUDA)
    assert mode == "full" and "packed weights" in why
    assert choose_checkpointing(config(tiny_llama, mode="fp8-aware"), tiny_llama, CUDA)[0] == "full"
    assert choose_checkpointing(config(tiny_llama), tiny_llama, torch.device("cpu"))[0] == "none"
