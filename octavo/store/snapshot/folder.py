"""The folder of a run's snapshots: which exist, which verify, and what may be deleted.

    step-N/       continues the run at step N      adapter-N/   the trained weights alone, between two of those
    run.json      whose folder this is             best.json    the step with the best metric
    .NAME.RUN-LIFE.tmp   being written or deleted; LIFE names the process, so that two never share one
    .bad-NAME.*, .left-NAME.*   set aside: failed its checksums; left behind by a resume from an earlier step

A step folder appears by one rename and is never written again. Steps order snapshots; no clock is asked.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import time
import uuid
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base.errors import CheckpointError, InputError
from octavo.base.log import logger
from octavo.base.report import UNREADABLE, read_json
from octavo.store.snapshot.files import Files, problem_of
from octavo.store.snapshot.manifest import SnapshotManifest, check_run

FULL, ADAPTER = "step", "adapter"  # what a folder's name begins with, by kind
OWNER, BEST = "run.json", "best.json"
_NAME = re.compile(r"(step|adapter)-(\d+)")


@dataclass(frozen=True)
class Keep:
    """last: full snapshots that stay. every: those at multiples of it stay too; 0: none. The best stays always."""

    last: int = 2
    every: int = 0


class SnapshotFolder:
    """Reads and housekeeping of one folder. OSError passes through, except where a method says otherwise."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.path, self.files = path, files or Files()
        self._checked: set[str] = set()

    def steps(self, kind: str = FULL) -> list[int]:
        """The steps whose folder is there, ascending; whether they verify is another question."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(child.name) for child in self.path.iterdir() if child.is_dir())
        return sorted(int(match[2]) for match in found if match and match[1] == kind)

    def at(self, step: int, kind: str = FULL) -> Path:
        return self.path / f"{kind}-{step}"

    def problem(
        self, step: int, kind: str = FULL, *, pool: Executor | None = None, share: tuple[int, int] = (0, 1)
    ) -> str | None:
        """Why a snapshot must not be used, or None. share: (i, n) reads only the i-th of n parts of its files."""
        folder = self.at(step, kind)
        try:
            manifest = SnapshotManifest.read(folder)
        except CheckpointError as error:
            return error.message
        if manifest.step != step:
            return f"the manifest is of step {manifest.step}"
        for index, (name, record) in enumerate(sorted(manifest.files.items())):
            if index % share[1] == share[0] and (problem := problem_of(folder / name, record, pool)):
                return problem
        return None

    def latest_verified(self, *, pool: Executor | None = None) -> int | None:
        """The newest step that verifies. What fails is set aside, with a message."""
        for step in reversed(self.steps()):
            problem = self.problem(step, pool=pool)
            if problem is None:
                return step
            self.quarantine(step, problem)
        return None

    def quarantine(self, step: int, problem: str, kind: str = FULL) -> None:
        """Take a broken snapshot out of the line; it is kept for whoever wants to look at it."""
        moved = self._set_aside(self.at(step, kind), "bad")
        logger().warning(
            "snapshot %s is broken and not used: %s; it is kept as %s", self.at(step, kind), problem, moved
        )

    def leave_behind(self, step: int) -> None:
        """Set aside all that is newer than `step`: the run goes on from there, on another path."""
        for kind in (FULL, ADAPTER):
            for newer in self.steps(kind):
                if newer > step:
                    moved = self._set_aside(self.at(newer, kind), "left")
                    logger().warning("%s is newer than the step to continue from; kept as %s", self.at(newer), moved)

    def _set_aside(self, folder: Path, why: str) -> str:
        for number in itertools.count():
            target = folder.with_name(f".{why}-{folder.name}.{number}")
            if not target.exists():
                break
        try:
            self.files.rename(folder, target)
        except OSError as error:
            return f"{folder.name}, for it cannot be moved ({error.strerror})"
        return target.name

    def owner(self) -> str | None:
        """The run this folder belongs to; None for a new folder."""
        with suppress(*UNREADABLE, KeyError, TypeError):
            return check_run(read_json(self.path / OWNER)["run"])
        for step in reversed(self.steps()):
            with suppress(CheckpointError):
                return SnapshotManifest.read(self.at(step)).run
        return None

    def claim(self, run: str) -> None:
        self.files.replace_file(self.path / OWNER, json.dumps({"run": run}).encode())

    def lock(self, wait: float = 60.0) -> int:
        """Keep other processes out until the returned handle is closed here and in every process that inherited it.

        The writer of a run that was killed holds it until its last snapshot is on disk, hence the wait, in seconds.
        InputError when it is still held then.
        """
        self.files.make_folder(self.path)
        handle = os.open(self.path, os.O_RDONLY)
        until, told = time.monotonic() + wait, False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() >= until:
                    os.close(handle)
                    need = "one run per folder"
                    raise InputError(
                        f"snapshots {self.path}", got="another process writing them", need=need, fix="End it, or wait."
                    ) from None
                if not told and wait:
                    logger().warning("%s is being written by another process: waiting", self.path)
                    told = True
                time.sleep(0.02)
            except OSError as error:
                logger().warning("%s cannot be locked (%s): keep other runs out of it", self.path, error.strerror)
                return handle

    def clean(self, run: str) -> None:
        """Delete what killed processes of this run left half-written or half-deleted. Call it with the lock held."""
        for rest in self.path.glob(f".*.{run}-*.tmp"):
            self.files.remove_tree(rest)

    def work(self, name: str, run: str, life: str) -> Path:
        return self.path / f".{name}.{run}-{life}.tmp"

    def set_best(self, step: int, value: float) -> None:
        self.files.replace_file(self.path / BEST, json.dumps({"step": step, "value": value}).encode())

    def best(self) -> dict[str, Any]:
        """{"step", "value"} of the best metric so far, or {}."""
        with suppress(*UNREADABLE):
            best = read_json(self.path / BEST)
            if isinstance(best, dict) and type(best.get("step")) is int and isinstance(best.get("value"), int | float):
                return best
        return {}

    def prune(self, run: str, keep: Keep, pool: Executor | None = None) -> list[int]:
        """Delete what `keep` does not name, of this run alone, once the newest snapshot was read back and verified.

        Returns the steps deleted. A newest snapshot that fails is set aside, and nothing is deleted.
        """
        mine = [step for step in self.steps() if self._is_of(run, step, FULL)]
        if not mine:
            return []
        newest = mine[-1]
        staying = {*mine[-keep.last :], self.best().get("step")}
        going = [s for s in mine if s not in staying and not (keep.every and s % keep.every == 0)]
        passed = [s for s in self.steps(ADAPTER) if s <= newest and self._is_of(run, s, ADAPTER)]
        if not going and not passed:
            return []
        if str(newest) not in self._checked:
            problem = self.problem(newest, pool=pool)
            if problem is not None:
                self.quarantine(newest, problem)
                return []
            self._checked = {str(newest)}
        for kind, steps in ((FULL, going), (ADAPTER, passed)):
            for step in steps:
                self._delete(self.at(step, kind), run)
        return going

    def _is_of(self, run: str, step: int, kind: str) -> bool:
        try:
            return SnapshotManifest.read(self.at(step, kind)).run == run
        except CheckpointError:
            return False

    def _delete(self, folder: Path, run: str) -> None:
        """Out of sight by a rename first: killed in between, nothing half-deleted keeps a name that means something."""
        hidden = self.work(folder.name, run, f"gone{uuid.uuid4().hex[:8]}")
        self.files.rename(folder, hidden)
        self.files.remove_tree(hidden)
