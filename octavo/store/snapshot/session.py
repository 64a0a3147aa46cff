"""One process (or one per rank) at work in a snapshot folder: its lock, the run's name, the step to continue from."""

from __future__ import annotations

import json
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from octavo.base.errors import CheckpointError, ConfigError, OctavoError
from octavo.base.log import logger
from octavo.store.folder import output_error
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.manifest import SnapshotManifest
from octavo.store.snapshot.ranks import Ranks
from octavo.store.snapshot.remote import RemoteStore

Resume = Literal["auto", "must", "never"] | int
THREADS = min(8, os.cpu_count() or 1)


class Session:
    """path: a folder that every rank sees. run: the name that resumed runs keep; life: this process's own.

    step: where to continue, None from the beginning. All ranks create it together. ConfigError, InputError and
    CheckpointError are raised on every rank.
    """

    def __init__(self, path: Path, resume: Resume = "auto", *, remote: dict[str, Any] | None = None) -> None:
        """resume: `auto` continues where there is something to continue, `must` insists, `never` wants a new folder;
        a number continues at that step and sets newer ones aside."""
        self.ranks = Ranks()
        self.folder = SnapshotFolder(path)
        self.lock: int | None = None
        try:
            opened = json.loads(self.ranks.first(partial(self._open, resume, remote)))
            self.run, self.life = opened["run"], opened["life"]
            self.step = self._agree(opened["steps"], resume)
            self.manifest = None if self.step is None else SnapshotManifest.read(self.folder.at(self.step))
            if self.ranks.rank == 0 and self.step is not None:
                self.folder.leave_behind(self.step)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others in. The writer process, which has inherited the lock, keeps it as long as it works."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def _open(self, resume: Resume, remote: dict[str, Any] | None) -> str:
        """Rank 0: take the folder, tidy it, list what could be continued; told to the others as JSON."""
        try:
            return json.dumps(self._take(resume, remote))
        except OSError as error:
            raise output_error(self.folder.path, error) from None

    def _take(self, resume: Resume, remote: dict[str, Any] | None) -> dict[str, Any]:
        self.lock = self.folder.lock()
        run = self.folder.owner() or uuid.uuid4().hex[:12]
        life = uuid.uuid4().hex[:12]
        self.folder.clean(run)
        if remote is not None and resume != "never":
            run = self._fetch(RemoteStore(remote["url"], remote["options"]), resume, run, life)
        steps = self.folder.steps()
        if resume == "never" and steps:
            fix = "Resume it, or give another folder."
            raise ConfigError(f"{self.folder.path} holds snapshots up to step {steps[-1]}", need="none", fix=fix)
        self.folder.claim(run)
        return {"run": run, "life": life, "steps": steps}

    def _fetch(self, store: RemoteStore, resume: Resume, run: str, life: str) -> str:
        """Bring the newest remote snapshot here, if it is newer than all that is here. Returns whose it is."""
        here = self.folder.steps()
        wanted = [s for s in store.steps() if (s == resume or isinstance(resume, str)) and s > max(here, default=-1)]
        for step in reversed(wanted):
            try:
                store.fetch(step, self.folder, life)
                return SnapshotManifest.read(self.folder.at(step)).run
            except OctavoError as error:
                logger().warning("%s is not used: %s", store.url, error.message)
        return run

    def _agree(self, steps: list[int], resume: Resume) -> int | None:
        """The newest step that verifies on all ranks, each of which reads its share of the files."""
        wanted = [resume] if isinstance(resume, int) else [] if resume == "never" else sorted(steps, reverse=True)
        with ThreadPoolExecutor(THREADS) as pool:
            for step in wanted:
                problem = self.folder.problem(step, pool=pool, share=(self.ranks.rank, self.ranks.world))
                if self.ranks.all_of(problem is None):
                    return step
                if isinstance(resume, int):
                    raise CheckpointError(f"snapshot {self.folder.at(step)}", got=problem or "broken files")
                self.ranks.first(partial(self._reject, step, problem))
        if resume == "must":
            raise CheckpointError(f"{self.folder.path} has no snapshot to continue from", fix="Check the path.")
        return None

    def _reject(self, step: int, problem: str | None) -> str:
        self.folder.quarantine(step, problem or "another rank found broken files")
        return ""
