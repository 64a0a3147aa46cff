"""A thread of the writer that copies finished snapshots to object storage, one at a time; a newer one goes first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from octavo.base.errors import OctavoError
from octavo.store.snapshot.channel import Message
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.jobs import Job
from octavo.store.snapshot.remote import RemoteStore


class Uploader:
    """put() never waits: while one snapshot is on its way only the newest of those behind it is kept."""

    def __init__(self, folder: SnapshotFolder, settings: Message, send: Callable[[Message], None]) -> None:
        self.folder, self._send = folder, send
        self._url, self._options = settings["url"], settings["options"]
        self._store: RemoteStore | None = None
        self._next: Job | None = None
        self._changed, self._ending = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="octavo-upload", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        with self._changed:
            self._next = job
            self._changed.notify()

    def finish(self) -> None:
        """Wait until nothing is left to upload."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._ending)
                job, self._next = self._next, None
            if job is None:
                return
            try:
                if self._store is None:
                    self._store = RemoteStore(self._url, self._options)
                    self._store.abort_unfinished()
                self._store.upload(self.folder.at(job.step))
                self._store.prune(job.run, job.keep, self.folder.best().get("step"))
                self._send({"event": "uploaded", "step": job.step})
            except (OSError, OctavoError) as error:
                if self.folder.at(job.step).exists():  # else it was pruned meanwhile: a newer one comes
                    text = f"upload to {self._url}: {error}"
                    self._send({"event": "not-uploaded", "step": job.step, "error": text})
