"""Times on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """The median time of a call on the device, each awaited."""
    times: list[float] = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def graph_milliseconds(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """The median time of one call: one CUDA graph over all of them, replayed."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:  # compiles and allocates before capture
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return milliseconds(graph.replay, rounds) / len(calls)
