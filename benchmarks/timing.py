"""Times on a GPU, shared by the benchmarks of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_milliseconds(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """The median time of one call: one CUDA graph over all of them, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:  # compiles and allocates before capture
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / len(calls))
    return statistics.median(times)
