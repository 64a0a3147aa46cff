"""CUDA graphs: what a function launches, captured once and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def capture(run: Callable[[], object], device: torch.device, warm: int = 2) -> torch.cuda.CUDAGraph:
    """What `run` launches on the device. It runs `warm` times before: kernels compile then, and libraries allocate.

    Nothing is garbage-collected meanwhile: freeing another CUDA graph, which may wait in a cycle for the collector,
    ends a capture with an error.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for _ in range(warm):
            run()
        torch.cuda.synchronize()
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
        finally:
            if enabled:
                gc.enable()
    return graph
