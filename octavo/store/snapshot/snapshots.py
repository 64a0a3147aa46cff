"""Snapshots: a training's state, saved beside it, found again after whatever happened to the process.

snapshots = Snapshots("run/snapshots", every=50)
for step in range(snapshots.start(TrainingState(model, optimizer, scheduler)), steps):
    ...                                   # forward, backward, optimizer.step(), scheduler.step()
    if snapshots.step_done(step + 1):
        break
snapshots.close()
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from octavo.base.errors import PREEMPTED, ConfigError, MismatchError, PreemptedError, RefusedError
from octavo.base.log import logger
from octavo.store.snapshot.folder import Keep
from octavo.store.snapshot.jobs import Job
from octavo.store.snapshot.layout import Layout
from octavo.store.snapshot.process import Start, start_process
from octavo.store.snapshot.session import Resume, Session
from octavo.store.snapshot.signals import StopRequest
from octavo.store.snapshot.state import TrainingState, load_random, read_training
from octavo.store.snapshot.writer import Failure, SnapshotWriter

NOTHING: Callable[[], Mapping[str, str]] = dict
PATIENCE = 240.0  # seconds; other ranks wait in a collective meanwhile, and NCCL ends those after 600
SLOW = 10.0  # seconds of waiting for the disk that are worth a message


class Snapshots:
    """every: the most steps that a kill can cost, at any instant. Full snapshots are taken at its multiples and half
    way between, and an optimizer step waits for the disk where more would be at risk; 0: only what `save` asks for.
    adapter_every: steps between saves of the trained weights alone. keep_last, keep_every: full snapshots that stay,
    and those at multiples.

    remote: url of object storage, to which full snapshots are copied; remote_options: for fsspec's file system.
    settings: what shapes the result; a resume with others is refused. base: fingerprint of the frozen model.
    on_error: `continue` reports a failed snapshot at the next step and in the exit code; `stop` raises at that step.
    grace: seconds for the last snapshot once somebody asks to stop. signals: take SIGTERM and SIGINT as asking.
    spot: address of a metadata service to ask for notices. exits: end with SystemExit, else with an OctavoError.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        every: int,
        adapter_every: int = 0,
        keep_last: int = 2,
        keep_every: int = 0,
        remote: str | None = None,
        remote_options: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        base: str = "",
        on_error: Literal["continue", "stop"] = "continue",
        grace: float = 60.0,
        signals: bool = True,
        spot: str | None = None,
        exits: bool = True,
        start: Start = start_process,
    ) -> None:
        if every < 0 or adapter_every < 0 or keep_last < 1 or keep_every < 0:
            got = f"every={every}, adapter_every={adapter_every}, keep_last={keep_last}, keep_every={keep_every}"
            raise ConfigError("snapshots", got=got, need="steps of 0 and more, and one snapshot to keep")
        self.path, self.every, self.adapter_every = Path(folder), every, adapter_every
        self.keep = Keep(keep_last, keep_every)
        self.remote = {"url": remote, "options": dict(remote_options or {})} if remote else None
        self.settings, self.base, self.on_error = dict(settings or {}), base, on_error
        self.grace, self.exits, self._start, self._take_signals, self._spot = grace, exits, start, signals, spot
        self.session: Session | None = None
        self.stop: StopRequest | None = None
        self.stalls: list[float] = []  # seconds that training stood still, one a snapshot
        self._failed: Failure | None = None
        self._saved: int | None = None
        self._reached = 0
        self._told_of_waiting = False
        self._preparing: threading.Thread | None = None
        self._prepared = False
        self._until = 0.0
        self._asked: str | None = None
        self._hook: Any = None

    def find(self, resume: Resume = "auto") -> int | None:
        """Take the folder and say which step to continue from; None from the beginning. See Session."""
        if self.session is None:
            self.session = Session(self.path, resume, remote=self.remote)
        return self.session.step

    def start(self, state: TrainingState, resume: Resume = "auto") -> int:
        """find, attach, restore_random. Returns the steps already taken."""
        step = self.find(resume)
        self.attach(state)
        self.restore_random()
        return step or 0

    def attach(self, state: TrainingState, more_files: Callable[[], Mapping[str, str]] = NOTHING) -> None:
        """Load the snapshot found into `state` and watch its optimizer. more_files: further files of rank 0, by name.

        MismatchError where model, adapter, optimizer or settings are not those of the snapshot.
        """
        session = self._session()
        self.state, self.more_files = state, more_files
        ranks = session.ranks
        try:
            if session.step is not None and session.manifest is not None:
                self._compare("model", session.manifest.base, self.base)
                folder, world = session.folder.at(session.step), session.manifest.world
                began = read_training(folder, 0, world)["settings"]
                for name in sorted({*began} | {*self.settings}):
                    self._compare(name, began.get(name), self.settings.get(name))
                state.load(folder, ranks.rank, ranks.world, world, ranks.group)
        except BaseException:
            session.close()
            raise
        self.writer = SnapshotWriter(
            session.folder,
            lock=session.lock,
            remote=self.remote,
            processes=int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)),
            patience=PATIENCE if ranks.world > 1 else None,
            hurried=lambda: self.stop is not None and self.stop.reason is not None,
            start=self._start,
        )
        self._saved = self.writer.durable = session.step
        self._reached = session.step or 0
        if self.remote and session.step is not None and ranks.rank == 0:  # the run may have died before its upload
            self.writer.upload(Job(session.step, "full", session.run, session.life, keep=self.keep))
        self.stop = StopRequest(self._spot) if self._take_signals else None
        self._hook = state.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def restore_random(self) -> None:
        """The random states of the snapshot: after whatever else draws numbers on the way to the first step."""
        session = self._session()
        if session.step is not None and session.manifest is not None:
            load_random(session.folder.at(session.step), session.ranks.rank, session.manifest.world)

    @property
    def durable(self) -> int | None:
        """The newest step that is on disk for certain, as rank 0 knows it."""
        return self.writer.durable

    def step_done(self, step: int) -> bool:
        """Call after every optimizer step, on every rank. True: somebody asked to stop, and the last snapshot is made.

        RefusedError with on_error `stop` when a snapshot has failed.
        """
        session = self._session()
        failures = self.writer.take_failures()
        for failure in failures:
            self._failed = failure
            logger().error("snapshot of step %d failed: %s; last on disk: %s", failure.step, failure.text, self.durable)
        asked = self.stop is not None and self.stop.reason is not None
        asked, failed = session.ranks.any_of(asked, bool(failures))
        if failed and not failures and session.ranks.rank == 0:
            self.writer.abort("a failure on another rank")
        if failed and self.on_error == "stop":
            raise RefusedError(f"a snapshot failed before step {step}", got=self._failed.text if self._failed else "")
        if asked:
            self._asked = self.stop.reason if self.stop and self.stop.reason else "another rank"
            self._last(step)
            return True
        self._reached = step
        if self.every and step % self.every in (0, self.every // 2):
            self.save(step)
        elif self.adapter_every and step % self.adapter_every == 0:
            self.save(step, "adapter")
        elif not self._prepared and self.every:
            self._prepare_early()
        return False

    def save(self, step: int, kind: Literal["full", "adapter"] = "full") -> None:
        """Save now, whatever the interval; after an optimizer step and before the next forward."""
        session, state = self._session(), self.state
        rank, world = session.ranks.rank, session.ranks.world
        self._prepare()
        small = dict(self.more_files()) if rank == 0 else {}
        started = time.perf_counter()
        if kind == "full":
            small |= state.small_files(rank, world, {"settings": self.settings, "step": step})
        layout = state.layout(kind, rank, world)
        if kind == "full":
            self._reserve(layout)
        names = session.run, session.life, self.base
        job = Job(step, kind, *names, rank, world, files=layout.plans, small=small, keep=self.keep)
        self.writer.submit(job, layout)
        self.stalls.append(time.perf_counter() - started)
        if kind == "full":
            self._saved = step

    def note_metric(self, step: int, value: float, *, greater_is_better: bool = False) -> None:
        """Keep the full snapshot of this step for good, until one with a better metric comes."""
        session = self._session()
        if session.ranks.rank == 0 and step == self._saved and math.isfinite(value):
            best = session.folder.best().get("value")
            if best is None or ((value > best) == greater_is_better and value != best):
                session.folder.set_best(step, value)

    def close(self, *, finished: bool = False) -> None:
        """Finish and let go of the folder. A run that was asked to stop ends here with exit code 75; one whose last
        snapshot failed with 1. finished: the training is at its end, so that stopping asks for nothing more."""
        stopped = None if finished else self._asked
        self._session().ranks.settle()
        whole = self.abandon(self._remaining() if stopped else None)
        for failure in self.writer.take_failures():
            self._failed = failure
        if stopped:
            self._end_stopped(stopped, whole)
        failed = self._failed
        if failed is not None and failed.step >= (self.durable or 0):
            self._end(
                RefusedError(
                    f"the snapshot of step {failed.step} failed", got=f"{failed.text}; on disk: {self.durable}"
                ),
                1,
            )

    def abandon(self, timeout: float | None = None) -> bool:
        """Finish what is in flight and let go of the folder, whatever came of it. False if it took too long."""
        if self._hook is None:
            self._session().close()
            return True
        self._hook.remove()
        if self._preparing:
            self._preparing.join()
        whole = self.writer.close(timeout)
        self._session().close()
        if self.stop:
            self.stop.close()
        return whole

    def _before_update(self) -> None:
        """The step that comes may be taken once, with it, no more than `every` are at risk."""
        self.writer.before_update(self._reached + 1 - self.every if self.every else 0)
        if self.writer.waited > SLOW and not self._told_of_waiting:
            self._told_of_waiting = True
            logger().warning(
                "training has waited %.0f s for snapshots: one takes the disk %.1f s, longer than half of %d steps",
                self.writer.waited,
                self.writer.seconds or 0.0,
                self.every,
            )

    def _last(self, step: int) -> None:
        """The snapshot before the end, within `grace` seconds; `close` takes what is left of them."""
        logger().warning("asked to stop (%s): saving step %d", self._asked, step)
        self._until = time.monotonic() + self.grace
        if self._saved != step and self.writer.drain(self._remaining()):
            self.save(step)
        self.writer.drain(self._remaining())

    def _remaining(self) -> float:
        return max(self._until - time.monotonic(), 0.1)

    def _end_stopped(self, reason: str, whole: bool) -> None:
        state = "" if whole else ", and one more is still being written"
        fix = "Run it again, octavo finetune with --resume auto: it continues from there."
        self._end(PreemptedError(f"stopped by {reason}", got=f"step {self.durable} on disk{state}", fix=fix), PREEMPTED)

    def _end(self, error: Exception, code: int) -> None:
        if not self.exits:
            raise error
        logger().error("%s", error)
        raise SystemExit(code)

    def _prepare_early(self) -> None:
        """Pinning takes a second per GB: done beside the first steps, once the optimizer has its moments."""
        if self._preparing is None:
            self._preparing = threading.Thread(target=self._make_room, name="octavo-pinning", daemon=True)
            self._preparing.start()

    def _prepare(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if not self._prepared:
            self._make_room()

    def _make_room(self) -> None:
        """Host buffers, and a look at the disk: it holds one snapshot more than are kept while one is written."""
        ranks = self._session().ranks
        nbytes = self._reserve(self.state.layout("full", ranks.rank, ranks.world))
        self._prepared = True
        free = shutil.disk_usage(self.path).free
        need = nbytes * ranks.world * (self.keep.last + 1 - len(self._session().folder.steps()))
        if free < need:
            logger().warning(
                "%s has %.1f GB free, and %d snapshots more will take %.1f GB",
                self.path,
                free / 1e9,
                self.keep.last + 1,
                need / 1e9,
            )

    def _reserve(self, layout: Layout) -> int:
        """Buffers for a full snapshot, if there are none of its size yet. Returns its bytes."""
        if layout.nbytes > self.writer.planned:
            ranks = self._session().ranks
            between = self.state.layout("adapter", ranks.rank, ranks.world).nbytes if self.adapter_every else 0
            self.writer.prepare(layout.nbytes, between, pin=self.state.gpu)
        return layout.nbytes

    def _compare(self, name: str, began: Any, now: Any) -> None:
        """As JSON has them: a tuple that comes back as a list is the same."""
        if json.dumps(began, sort_keys=True) != json.dumps(now, sort_keys=True):
            fix = "Resume with the settings of the run, or start a new one."
            raise MismatchError(
                f"{self.path} was trained with other settings: {name}", got=repr(now), need=repr(began), fix=fix
            )

    def _session(self) -> Session:
        if self.session is None:
            raise ConfigError("snapshots", got="a call before find or start", need="start first")
        return self.session
