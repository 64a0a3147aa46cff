"""Kill a training run again and again, resume it each time, and hold what it did against a run nobody killed.

    python -m tests.store.snapshot.killing --kills 2000 [--model NAME] [--root FOLDER]

Training processes are forked from this one, which has imported and loaded everything. Ways to die: the training alone
at a random instant, training and writer together, the writer alone, and the writer (alone or with the training) before,
in the middle of or after the n-th thing it does to the disk. After each death: every snapshot folder that has its name
verifies, and the next life starts from the newest snapshot that was reported durable, or a newer one, and loses at most
one interval. At the end every loss of every life is, to the bit, that of the undisturbed run. Prints one line of JSON;
exit code 1 if anything is off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from octavo.store.snapshot.files import Files
from octavo.store.snapshot.folder import SnapshotFolder
from tests.store.snapshot.lives import EVERY, Training, live, load_lora

MODELS = ("full", "sharded", "lora", "trainer-ddp", "trainer-ddp-lora", "trainer-fsdp", "trainer-fsdp-lora")
PHASES = ("before", "middle", "after")


class Deadly(Files):
    """Files that end the process (or its whole group) at the n-th change of the disk."""

    def __init__(self, point: int, phase: str, group: bool) -> None:
        self.left, self.phase, self.group = point, phase, group

    def _act(self, name: str, *arguments: object) -> object:
        self.left -= 1
        action = getattr(super(), name)
        if self.left or self.phase == "after":
            result = action(*arguments)
            if self.left:
                return result
        elif self.phase == "middle" and name == "write":
            handle, data, offset = arguments
            action(handle, data[: len(data) // 2], offset)
        os.killpg(0, signal.SIGKILL) if self.group else os.kill(os.getpid(), signal.SIGKILL)
        return None


def _deadly(name: str) -> object:
    return lambda self, *arguments: self._act(name, *arguments)


for _name in ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove_tree"):
    setattr(Deadly, _name, _deadly(_name))


@dataclass
class Harness:
    life: Callable[..., None]  # (folder, log, steps, files, rank, world, store)
    root: Path
    steps: int
    world: int
    dice: random.Random
    moment: float = 0.02  # seconds, at most, between the last step seen and the end
    kills: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: Counter = field(default_factory=Counter)
    resumed: int = 0
    lives: int = 0

    def warm(self) -> None:
        """Whatever is imported on first use is imported here, once: a resume, too, when nobody else is needed."""
        log = os.open(self.root / "warm.log", os.O_WRONLY | os.O_CREAT)
        life = partial(live, Training("full")) if self.world > 1 else self.life
        for steps in (EVERY, EVERY + 1):
            life(self.root / "warm", log, steps, Files(), 0, 1, "")
        os.close(log)

    def curve(self) -> dict[tuple[int, int], str]:
        """The losses of a run that nobody kills."""
        log = self.root / "straight.log"
        self._start(self.root / "straight", log, Files())
        for pid in self.pids:
            assert os.waitpid(pid, 0)[1] == 0, log.read_text()
        return {(w[0], w[2]): w[3] for w in _words(log) if w[1] == "step"}

    def attempt(self, number: int, want: dict) -> None:
        """One run, killed until it gets to its end."""
        folder, log = self.root / f"run{number}", self.root / f"run{number}.log"
        while not (log.exists() and len({w[0] for w in _words(log) if w[1] == "end"}) == self.world):
            before = _words(log) if log.exists() else []
            way = self.dice.choice(["training", "group", "writer", "point", "point"])
            files = Files()
            if way == "point":
                files = Deadly(self.dice.randint(1, 60), self.dice.choice(PHASES), True)
            self._start(folder, log, files)
            self._end(way, log, len(before))
            self._check(folder, before, _words(log))
            if len(self.wrong) > 5:
                return
        for words in _words(log):
            if words[1] == "step" and want[words[0], words[2]] != words[3]:
                here, there = words[3], want[words[0], words[2]]
                self.wrong.append(f"loss of rank {words[0]}, step {words[2]}: {here}, undisturbed {there}")
        shutil.rmtree(folder)
        log.unlink()

    def _start(self, folder: Path, log: Path, files: Files) -> None:
        store = f"{folder}.store{self.lives}"
        self.lives += 1
        self.pids = []
        for rank in range(self.world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.setpgid(0, self.pids[0] if self.pids else 0)
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(os.open(f"{log}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                    os.dup2(null, 1)
                    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    self.life(folder, handle, self.steps, files, rank, self.world, store)
                    code = 0
                except BaseException as error:
                    os.write(2, f"rank {rank}: {error!r}\n".encode())
                finally:
                    os._exit(code)
            self.pids.append(pid)
            os.setpgid(pid, self.pids[0])

    def _end(self, way: str, log: Path, known: int) -> None:
        """Wait until the life has taken some steps and a moment more, or is over; then end what is left of it."""
        codes: dict[int, int] = {}
        steps = self.dice.randint(0, self.steps // 3) * self.world
        deadline, over = None, time.monotonic() + 120
        while len(codes) < self.world:
            for pid in self.pids:
                if pid not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(done[1])
            if any(codes.values()):
                break
            if deadline is None and way != "point" and _begun(log, known) > steps:
                deadline = time.monotonic() + self.dice.random() * self.moment
            if time.monotonic() > (deadline or over):
                break
            time.sleep(0.003)
        if len(codes) == self.world and not any(codes.values()):
            return
        self.kills[way] += 1
        if way == "writer":
            writers = [int(w[2]) for w in _words(log)[known:] if w[1] == "worker"]
            if writers:
                _kill(writers[-1])
            time.sleep(self.dice.random() * self.moment)
        if way == "group":
            os.killpg(self.pids[0], signal.SIGKILL)
        for pid in self.pids:
            if pid not in codes:
                _kill(pid)
                os.waitpid(pid, 0)

    def _check(self, folder: Path, before: list, now: list) -> None:
        """Nothing that has its name is broken; nothing that was durable is gone; how much work was lost."""
        snapshots = SnapshotFolder(folder)
        os.close(snapshots.lock(30.0))  # a writer that outlived its training has finished
        for step in snapshots.steps():
            if problem := snapshots.problem(step):
                self.wrong.append(f"step {step}: {problem}")
        mine = [w for w in now if w[0] == "0"]
        durable = max((int(w[2]) for w in mine if w[1] == "durable"), default=0)
        newest = max(snapshots.steps(), default=0)
        if newest < durable:
            self.wrong.append(f"step {durable} was durable, the newest now is {newest}")
        old = [w for w in before if w[0] == "0"]
        for at, words in enumerate(mine):
            if words[1] == "start" and at >= len(old):
                self.resumed += int(words[2]) > 0
                reached = max((int(w[2]) for w in mine[:at] if w[1] == "step"), default=0)
                if reached:
                    lost = max(0, reached - int(words[2]))
                    self.lost[lost] += 1
                    if lost > EVERY:
                        self.wrong.append(f"step {reached} was reached, {words[2]} is where the next life began")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _begun(log: Path, known: int) -> int:
    """0 until a life has found where to start, then one more than the steps it has taken."""
    words = [w[1] for w in _words(log)[known:]] if log.exists() else []
    return words.count("start") and 1 + words.count("step")


def _words(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()]


def run(kills: int, kind: str, root: Path, seed: int = 0, lora: nn.Module | None = None) -> dict:
    torch.set_num_threads(1)
    life = partial(live, Training(kind, lora))
    if kind.startswith("trainer-"):
        from tests.integrations import trainer_lives

        life = partial(trainer_lives.live, kind.removeprefix("trainer-"))
    world = 1 if kind in ("full", "lora") else 2
    harness = Harness(life, root, 9 if lora else 24, world, random.Random(seed))
    harness.warm()
    started, number, shown = time.monotonic(), 0, 0
    want = harness.curve()
    while True:
        found = {
            "model": kind,
            "ranks": world,
            "kills": sum(harness.kills.values()),
            "ways": dict(harness.kills),
            "runs": number,
            "resumed": harness.resumed,
            "steps_lost": {str(steps): lives for steps, lives in sorted(harness.lost.items())},
            "every": EVERY,
            "seconds": round(time.monotonic() - started, 1),
            "wrong": harness.wrong,
        }
        if found["kills"] >= kills or harness.wrong:
            return found
        if found["kills"] >= shown + 100:
            shown = found["kills"]
            print(json.dumps(found), flush=True)
        harness.attempt(number, want)
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="full",
    )
    parser.add_argument("--demo", type=Path, help="folder of the model for lora")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lora = load_lora(options.demo) if options.model == "lora" else None
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        result = run(options.kills, options.model, Path(root), options.seed, lora)
    print(json.dumps(result), flush=True)
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
