"""The writer: a process of its own, so that hashing and writing take neither the GIL nor a core's time from training.

It outlives a training process that was killed just long enough to finish the snapshot it has in memory, and it leaves
SIGINT and SIGTERM to the training process, which ends it by closing the connection.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.base.errors import OctavoError
from octavo.store.snapshot.channel import Channel, Message
from octavo.store.snapshot.files import Files, Source
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.jobs import FilePlan, Job, write
from octavo.store.snapshot.upload import Uploader

THREADS = min(8, os.cpu_count() or 1)
ORPHAN_PATIENCE = 2.0  # seconds for the parts of other ranks, once our own training process is gone


class Worker:
    def __init__(self, channel: Channel, folder: SnapshotFolder) -> None:
        self.channel, self.folder = channel, folder
        self.buffers: list[mmap.mmap] = []
        self.pool = ThreadPoolExecutor(THREADS)
        self.uploader: Uploader | None = None
        self.messages: list[Message | None] = []
        self.aborted: dict[int, str] = {}  # step -> why nobody need wait for it
        self._orphan_until = 0.0

    def run(self) -> None:
        """Until the training process closes the connection, or is gone."""
        while (message := self._next()) is not None:
            kind = message["do"]
            if kind == "buffers":
                self.buffers = [_mapped(handle) for handle in self.channel.take_handles()]
            elif kind == "remote":
                self.uploader = Uploader(self.folder, message, self.channel.send)
            elif kind == "write":
                self._write(Job.of(message["job"]))
            elif kind == "abort":
                self.aborted[message["step"]] = message["reason"]
            elif kind == "upload" and self.uploader:
                self.uploader.put(Job.of(message["job"]))
            elif kind == "finish":
                if self.uploader:
                    self.uploader.finish()
                self.channel.send({"event": "finished"})
        self.pool.shutdown()

    def _next(self) -> Message | None:
        return self.messages.pop(0) if self.messages else self.channel.receive()

    def _write(self, job: Job) -> None:
        started = time.monotonic()
        try:
            write(self.folder, job, lambda plan: self._source(job, plan), self.pool, lambda: self._given_up(job.step))
        except (OSError, OctavoError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._tell({"event": "failed", "step": job.step, "error": text})
            return
        seconds = round(time.monotonic() - started, 6)
        self._tell({"event": "durable", "step": job.step, "kind": job.kind, "seconds": seconds})
        if job.rank == 0:
            self._after(job)

    def _after(self, job: Job) -> None:
        try:
            self.folder.prune(job.run, job.keep, self.pool)
        except OSError as error:
            self._tell({"event": "warning", "text": f"old snapshots cannot be deleted: {error.strerror}"})
        if self.uploader and job.kind == "full":
            self.uploader.put(job)

    def _source(self, job: Job, plan: FilePlan) -> Source:
        view = memoryview(self.buffers[job.buffer])[plan.begin : plan.begin + plan.size]
        return lambda begin, size: view[begin : begin + size]

    def _given_up(self, step: int) -> str | None:
        """Asked while waiting for other ranks: takes in what the training process says meanwhile."""
        if step in self.aborted:
            return self.aborted[step]
        if None in self.messages:
            time.sleep(0.02)
            return "the run was killed" if time.monotonic() >= self._orphan_until else None
        if not self.channel.waiting(0.02):
            return None
        message = self.channel.receive()
        if message is not None and message["do"] == "abort":
            self.aborted[message["step"]] = message["reason"]
            return self.aborted.get(step)
        self.messages.append(message)
        self._orphan_until = time.monotonic() + ORPHAN_PATIENCE
        return None

    def _tell(self, event: Message) -> None:
        try:
            self.channel.send(event)
        except OSError:
            print(f"octavo snapshots: {event}", file=sys.stderr)  # the training process is gone


def _mapped(handle: int) -> mmap.mmap:
    try:
        return mmap.mmap(handle, 0)
    finally:
        os.close(handle)


def serve(connection: socket.socket, folder: Path, files: Files | None = None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Worker(Channel(connection), SnapshotFolder(folder, files)).run()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
