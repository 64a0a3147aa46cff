"""The training's side of the writer process: buffers, back-pressure, and news of what became durable or failed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.base.errors import OctavoError
from octavo.base.log import logger
from octavo.store.snapshot.channel import Channel, Message
from octavo.store.snapshot.files import Source
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.host import HostBuffer, buffers_that_fit
from octavo.store.snapshot.jobs import FilePlan, Job, write
from octavo.store.snapshot.layout import Layout
from octavo.store.snapshot.process import Process, Start, start_process
from octavo.store.snapshot.staging import Lane, Staged, lane_for, stage

LOOK = 0.1  # seconds between looks at whether there is still time to wait


@dataclass(frozen=True)
class Failure:
    """A snapshot that did not become durable, or not on object storage."""

    step: int
    text: str


@dataclass
class _Submitted:
    job: Job
    staged: Staged


class SnapshotWriter:
    """One writer process and at most two host buffers.

    Before an optimizer step is taken, every snapshot but the newest is durable or has failed, and the newest too where
    that step would leave too much at risk: `before_update`. With one buffer the wait is in `submit`. What fits in none
    is written by `submit` itself, in the training process; `prepare` has said so.
    """

    def __init__(
        self,
        folder: SnapshotFolder,
        *,
        lock: int | None = None,
        remote: dict[str, Any] | None = None,
        processes: int = 1,
        patience: float | None = None,
        hurried: Callable[[], bool] = lambda: False,
        start: Start = start_process,
    ) -> None:
        """remote: {"url", "options"} of object storage. processes: ranks on this machine, which share its memory.

        patience: seconds that training waits for a disk that does not answer, then it goes on without; None: for ever.
        hurried: True once nobody has the time to wait.
        """
        self.folder, self._lock, self._remote, self._processes = folder, lock, remote, processes
        self._patience, self._hurried, self._stuck = patience, hurried, False
        self.durable: int | None = None  # the newest step known to be on disk, to continue from
        self.uploaded: int | None = None
        self.seconds: float | None = None  # that the last write took
        self.waited = 0.0  # seconds that optimizer steps waited for the disk
        self._start = start
        self._failures: list[Failure] = []
        self._channel: Channel | None = None
        self._process: Process | None = None
        self._buffers: list[HostBuffer] = []
        self._free: deque[int] = deque()
        self._lane: Lane | None = None
        self._queue: deque[_Submitted | None] = deque()
        self._open = 0  # submitted, neither durable nor failed
        self._staged: Staged | None = None
        self.planned = -1  # bytes of a full snapshot that the buffers were made for
        self._writing: int | None = None
        self._changed = threading.Condition()
        self._courier = threading.Thread(target=self._carry, name="octavo-snapshots", daemon=True)
        self._courier.start()

    def prepare(self, nbytes: int, weights: int, *, pin: torch.device | None) -> None:
        """Buffers for full snapshots of nbytes, as many as host memory allows; where it allows none, for the trained
        weights alone, if those are saved between (weights: their bytes, else 0). Waits for what is in flight."""
        self.drain()
        self._release()
        size, count = nbytes, buffers_that_fit(nbytes, self._processes)
        if count == 0:
            size, count = weights, buffers_that_fit(weights, self._processes) if weights else 0
            but = f"; saves of the trained weights alone, {weights / 1e9:.1f} GB, still run beside it" if count else ""
            logger().warning(
                "host memory has no room for a snapshot of %.1f GB: it is written while training waits%s",
                nbytes / 1e9,
                but,
            )
        self.planned = nbytes
        self._buffers = [HostBuffer(size, pin=pin) for _ in range(count)]
        self._free = deque(range(count))
        with self._changed:
            if self._channel is not None:
                self._send_buffers(self._channel)

    def submit(self, job: Job, layout: Layout) -> float:
        """Queue a snapshot; `prepare` came before. Returns the seconds that training stood still for it."""
        started = time.perf_counter()
        here = not self._buffers or self._buffers[0].nbytes < layout.nbytes
        with self._changed:
            if not self._waited_for(lambda: self._open == 0 if here else bool(self._free)):
                self._fail(job.step, "the one before it is still being written")
                return time.perf_counter() - started
            if not here:
                index = self._free.popleft()
                self._open += 1
        if here:
            self._write_here(job, layout)
            return time.perf_counter() - started
        self._lane = self._lane or lane_for(layout)
        try:
            self._staged = stage(layout, self._buffers[index].data, self._lane)
        except BaseException:
            self._finished(index)
            raise
        with self._changed:
            self._queue.append(_Submitted(replace(job, buffer=index), self._staged))
            self._changed.notify_all()
        return time.perf_counter() - started

    def before_update(self, need: int) -> None:
        """Call before parameters change. Queues a wait for the copy on the device, and bounds what a kill can cost:
        waits until the snapshot of step `need`, or a newer one, is durable or nothing is in flight that could be."""
        if self._staged is not None:
            self._staged.hold_training()
            self._staged = None
        if self._settled(need):
            return
        started = time.perf_counter()
        with self._changed:
            self._waited_for(lambda: self._settled(need))
        self.waited += time.perf_counter() - started

    def _settled(self, need: int) -> bool:
        return self._open == 0 or (self._open == 1 and (self.durable or 0) >= need)

    def _waited_for(self, what: Callable[[], bool]) -> bool:
        """With `_changed` held. False: out of patience, now or before, or in a hurry."""
        until = None if self._patience is None else time.monotonic() + self._patience
        while not what():
            self._stuck |= until is not None and time.monotonic() >= until
            if self._stuck or self._hurried():
                return False
            self._changed.wait(LOOK)
        return True

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight; False if that took longer than timeout seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout)

    def take_failures(self) -> list[Failure]:
        with self._changed:
            taken, self._failures = self._failures, []
            return taken

    def abort(self, reason: str) -> None:
        """Rank 0: wait no longer for the parts of other ranks, of the snapshot that is being written."""
        channel, step = self._channel, self._writing
        if channel is not None and step is not None:
            with suppress(OSError):  # the writer is gone: nobody waits
                channel.send({"do": "abort", "step": step, "reason": reason})

    def upload(self, job: Job) -> None:
        """A snapshot that is on disk already, if it is not there yet. Call it while nothing is in flight."""
        self._connected().send({"do": "upload", "job": job.plain()})

    def close(self, timeout: float | None = None) -> bool:
        """Let the writer finish, uploads included, and end it. False if it had to be left working on its own."""
        whole = self.drain(timeout)
        if whole:
            with self._changed:
                self._queue.append(None)
                self._changed.notify_all()
            self._courier.join(timeout)
            whole = not self._courier.is_alive()
        if self._channel is not None:
            self._channel.close()
        if whole and self._process is not None:
            self._process.wait()
        if whole:
            self._release()
        return whole

    def _release(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._free = [], deque()

    def _carry(self) -> None:
        """The courier thread: waits for copies, hands them to the writer, takes its news. Ends at a None."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                item = self._queue.popleft()
            if item is None:
                if self._channel is not None and self._remote is not None:
                    self._exchange(0, {"do": "finish"}, ("finished",))
                return
            self._writing = item.job.step
            try:
                item.staged.wait()
                self._exchange(item.job.step, {"do": "write", "job": item.job.plain()}, ("durable", "failed"))
            except Exception as error:
                self._fail(item.job.step, f"{type(error).__name__}: {error}")
            self._writing = None
            self._finished(item.job.buffer)

    def _finished(self, buffer: int) -> None:
        with self._changed:
            self._open -= 1
            self._stuck = False
            self._free.append(buffer)
            self._changed.notify_all()

    def _exchange(self, step: int, message: Message, until: tuple[str, ...]) -> None:
        """Send, then take news until the answer comes."""
        channel = self._connected()
        try:
            channel.send(message)
            while (news := channel.receive()) is not None:
                self._note(news)
                if news["event"] in until:
                    return
        except OSError as error:
            logger().debug("connection to the snapshot writer: %s", error)
        self._channel = None
        channel.close()
        code = self._process.wait() if self._process else None
        self._fail(step, f"the writer process ended unasked (exit code {code}); the next snapshot starts another")

    def _connected(self) -> Channel:
        if self._channel is None:
            connection, self._process = self._start(self.folder.path, self._lock)
            channel = Channel(connection)
            if self._remote is not None:
                channel.send({"do": "remote", **self._remote})
            with self._changed:
                self._send_buffers(channel)
                self._channel = channel
        return self._channel

    def _send_buffers(self, channel: Channel) -> None:
        if self._buffers:
            channel.send({"do": "buffers"}, [buffer.handle for buffer in self._buffers])

    def _note(self, news: Message) -> None:
        event = news["event"]
        if event == "durable":
            self.seconds = news["seconds"]
            if news["kind"] == "full":
                self.durable = news["step"]
        elif event == "uploaded":
            self.uploaded = news["step"]
        elif event in ("failed", "not-uploaded"):
            self._fail(news["step"], news["error"])
        elif event == "warning":
            logger().warning("snapshots %s: %s", self.folder.path, news["text"])

    def _fail(self, step: int, text: str) -> None:
        with self._changed:
            self._failures.append(Failure(step, text))

    def _write_here(self, job: Job, layout: Layout) -> None:
        """Without a buffer: block by block through a small one, in this process."""
        started = time.monotonic()
        job = replace(job, patience=self._patience or job.patience)
        try:
            write(self.folder, job, lambda plan: _through_memory(layout, plan), None, lambda: None)
            self.seconds = time.monotonic() - started
            if job.kind == "full":
                self.durable = job.step
            if job.rank == 0:
                self.folder.prune(job.run, job.keep)
                if self._remote is not None:
                    self.upload(job)
        except (OSError, OctavoError) as error:
            self._fail(job.step, str(error))


def _through_memory(layout: Layout, plan: FilePlan) -> Source:
    """The bytes of a file straight from the tensors, one block at a time."""

    def source(begin: int, size: int) -> memoryview:
        block = torch.empty(size, dtype=torch.uint8)
        first = plan.begin + begin
        for copy in layout.copies:
            raw = copy.bytes() if copy.begin < first + size and first < copy.begin + copy.nbytes else None
            if raw is not None and raw.numel():
                low, high = max(first, copy.begin), min(first + size, copy.begin + raw.numel())
                block[low - first : high - first].copy_(raw[low - copy.begin : high - copy.begin])
        return memoryview(block.numpy().data)

    return source
