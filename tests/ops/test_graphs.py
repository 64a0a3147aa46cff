"""capture, with a graph that only remembers: no collection inside it, and what waited for one is gone before."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from octavo.ops.graphs import capture


@pytest.fixture
def fake_cuda(monkeypatch):
    order = []

    class Stream(nullcontext):
        def wait_stream(self, other):
            order.append(other)

    for name in ("CUDAGraph", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "ours")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: nullcontext())
    return order


class Cycle:
    def __init__(self):
        self.me = self


def test_what_the_caller_writes_is_there(fake_cuda):
    """Else a graph's first run looks up tokens in memory that nobody has written."""
    capture(lambda: fake_cuda.append("run"), torch.device("cpu"), warm=1)
    assert fake_cuda == ["ours", "run", "run", "run"]


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
