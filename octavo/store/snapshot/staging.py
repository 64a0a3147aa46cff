"""Device -> host beside the training: the copy runs on a stream of its own, under the next forward and backward.

Order on a GPU. The copy waits for the step that made the state. Buffers, which a forward may change, go first, and the
next forward waits for those alone; parameters and moments change in the optimizer step, which waits for the rest. All
waits are of streams: the CPU goes on. On a CPU tensor a copy is done when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from octavo.store.snapshot.layout import Layout

Placed = tuple[int, list[torch.Tensor]]  # the first byte in the buffer, and what lies there behind each other, uint8


class Lane(Protocol):
    """A stream beside that of the training. Marks are points on it."""

    def follow(self) -> None:
        """What comes next on the lane comes after all that the training has queued so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def join(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of several tensors behind each other, still on the device."""

    def mark(self) -> Any: ...

    def hold(self, mark: Any) -> None:
        """What the training queues from now on waits for the mark."""

    def wait(self, mark: Any) -> None:
        """The calling thread waits for the mark."""


class CpuLane:
    """Nothing is asynchronous: tensors in host memory."""

    def follow(self) -> None:
        return

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def join(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(sources))

    def mark(self) -> None:
        return None

    def hold(self, mark: None) -> None:
        return

    def wait(self, mark: None) -> None:
        return


class CudaLane:
    """A CUDA stream on each of the GPUs that hold sources; a mark is an event on each.

    Sources must stay alive until the last mark is reached: Staged keeps them. What `join` makes needs nobody to keep
    it: it was allocated on the stream that reads it, so the allocator gives its memory to later work of that stream.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.streams: dict[torch.device, Any] = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in devices
        }

    def follow(self) -> None:
        for device, stream in self.streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._stream_of(source):
            target.copy_(source, non_blocking=True)

    def join(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        with self._stream_of(sources[0]):
            return torch.cat(list(sources))

    def _stream_of(self, source: torch.Tensor) -> Any:
        return torch.cuda.stream(self.streams[source.device] if source.is_cuda else None)

    def mark(self) -> Any:
        events = {device: torch.cuda.Event(blocking=True) for device in self.streams}  # type: ignore[no-untyped-call]
        for device, event in events.items():
            event.record(self.streams[device])
        return events

    def hold(self, mark: Any) -> None:
        for device, event in mark.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, mark: Any) -> None:
        for device, event in mark.items():
            with torch.cuda.device(device):  # a thread's own is the first GPU, which other ranks use
                event.synchronize()


class Staged:
    """A copy under way. keep: what must stay alive until it is done."""

    def __init__(self, lane: Lane, mark: Any, keep: object) -> None:
        self._lane, self._mark, self._keep = lane, mark, keep

    def hold_training(self) -> None:
        """Call before parameters change: what is queued from now on waits for the copy."""
        self._lane.hold(self._mark)

    def wait(self) -> None:
        """Until the host has all bytes."""
        self._lane.wait(self._mark)
        self._keep = None


def lane_for(layout: Layout) -> Lane:
    gpus = dict.fromkeys(copy.tensor.device for copy in layout.copies if copy.tensor.is_cuda)
    return CudaLane(gpus) if gpus else CpuLane()


def stage(layout: Layout, buffer: torch.Tensor, lane: Lane) -> Staged:
    """Queue the copies of a layout into buffer, uint8 [nbytes]."""
    # Made before the lane follows: a tensor with gaps is joined by a kernel of the training's own stream.
    sooner, later = ([(run[0].begin, [copy.bytes() for copy in run]) for run in runs] for runs in layout.runs)
    lane.follow()
    if sooner:
        _queue(sooner, buffer, lane)
        lane.hold(lane.mark())
    _queue(later, buffer, lane)
    return Staged(lane, lane.mark(), (layout, sooner, later))


def _queue(runs: list[Placed], buffer: torch.Tensor, lane: Lane) -> None:
    for begin, data in runs:
        joined = data[0] if len(data) == 1 else lane.join(data)
        lane.copy(buffer[begin : begin + joined.numel()], joined)
