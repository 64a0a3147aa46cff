"""CUDA graphs: what a function launches, captured once and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from octavo.kernels.cuda import loader


def capture(
    run: Callable[[], object], device: torch.device, warm: int = 2, beside: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """What `run` launches on the device. It runs `warm` times before, when libraries allocate, and before that once
    without our kernels, which compile beside each other then.

    beside: a graph that never runs at the same time, whose memory this one may take for what it does not return.
    Nothing is garbage-collected meanwhile: freeing another CUDA graph, which may wait in a cycle for the collector,
    ends a capture with an error.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # what `run` reads may still be on its way into memory
    with torch.cuda.device(device), torch.cuda.stream(stream):
        with loader.only_compiling(device):
            run()
        for _ in range(warm):
            run()
        torch.cuda.synchronize()
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=beside.pool() if beside else None, stream=stream):
                run()
        finally:
            if enabled:
                gc.enable()
    return graph
