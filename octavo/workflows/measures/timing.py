"""Times on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from octavo.ops.graphs import capture


def seconds(call: Callable[[], object]) -> float:
    """Of one call with its wait for the device, the host's part included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


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

    def run() -> None:
        for call in calls:
            call()

    return milliseconds(capture(run, torch.device("cuda"), warm=1).replay, rounds) / len(calls)
