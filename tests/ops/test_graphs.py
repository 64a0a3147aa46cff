"""capture, with a graph that only remembers: no collection inside it, and what waited for one is gone before."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from octavo.ops.graphs import capture


@pytest.fixture
def fake_cuda(monkeypatch):
    for name in ("Stream", "CUDAGraph", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: nullcontext())


class Cycle:
    def __init__(self):
        self.me = self


def test_no_collection_inside(fake_cuda):
    waiting, states = weakref.ref(Cycle()), []

    def run():
        states.append((gc.isenabled(), waiting() is None))

    capture(run, torch.device("cpu"), warm=1)
    assert states[-1] == (False, True) and gc.isenabled()


def test_an_error_inside(fake_cuda):
    calls = []

    def run():
        calls.append(gc.isenabled())
        if len(calls) > 3:
            raise RuntimeError("capture")

    with pytest.raises(RuntimeError, match="capture"):
        capture(run, torch.device("cpu"))
    assert calls == [True, True, True, False] and gc.isenabled()


def test_who_collects_nothing_still_does_not(fake_cuda):
    gc.disable()
    try:
        capture(lambda: None, torch.device("cpu"))
        assert not gc.isenabled()
    finally:
        gc.enable()
