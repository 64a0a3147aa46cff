"""Kill a training run again and again, resume it each time, and hold what it did against a run nobody killed.

    python -m tests.store.snapshot.killing --kills 2000 [--model full|sharded|lora] [--root FOLDER]

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
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from octavo.store.snapshot.files import Files
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.snapshots import Snapshots
from octavo.store.snapshot.state import TrainingState
from octavo.store.snapshot.worker import serve

EVERY = 3
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


class Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_worker(files: Files, told: object = None):
    """A start function for SnapshotWriter: the real worker, in a forked child."""

    def start(folder: Path, lock: int | None) -> tuple[socket.socket, Forked]:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            try:
                serve(theirs, folder, files)
            finally:
                os._exit(0)
        theirs.close()
        if told:
            told(pid)
        return ours, Forked(pid)

    return start


class Rows:
    """Packed rows of tokens in shuffled order, with a position that a snapshot takes along."""

    def __init__(self, vocabulary: int, width: int) -> None:
        self.rows = torch.randint(0, vocabulary, (24, width), generator=torch.Generator().manual_seed(7))
        self.order: list[int] = []

    def next(self) -> torch.Tensor:
        if not self.order:
            self.order = torch.randperm(len(self.rows)).tolist()
        return self.rows[self.order.pop()][None]

    def state_dict(self) -> dict[str, list[int]]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.order = list(state["order"])


class Small(nn.Module):
    """A language model of one transformer layer, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 2, 48, dropout=0.1, batch_first=True)])
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@dataclass
class Training:
    """What each life trains: `build` makes model, tokens a row has and vocabulary; accumulation 2."""

    kind: str
    lora: nn.Module | None = None

    def build(self) -> tuple[nn.Module, Rows]:
        torch.manual_seed(0)
        if self.lora is not None:
            return self.lora, Rows(1000, 12)
        model = Small()
        if self.kind == "sharded":
            from torch.distributed.fsdp import fully_shard

            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        return model, Rows(64, 12)

    def loss(self, model: nn.Module, row: torch.Tensor) -> torch.Tensor:
        out = model(input_ids=row).logits if self.lora is not None else model(row)
        return nn.functional.cross_entropy(out[0, :-1].float(), row[0, 1:])


def live(
    training: Training, folder: Path, log: int, steps: int, files: Files, rank: int, world: int, store: str
) -> None:
    """One life of a training process: resume, train, snapshot, until the end or death."""

    def tell(*words: object) -> None:
        os.write(log, (" ".join(map(str, (rank, *words))) + "\n").encode())

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    model, rows = training.build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = TrainingState(model, optimizer, scheduler, {"rows": rows})
    torch.manual_seed(100 + rank)
    start = fork_worker(files if rank == 0 else Files(), lambda pid: tell("worker", pid))
    snapshots = Snapshots(folder, every=EVERY, start=start, signals=False)
    begin = snapshots.start(state)
    tell("start", begin)
    for step in range(begin, steps):
        total = 0.0
        for _ in range(2):
            loss = training.loss(model, rows.next()) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        tell("step", step + 1, total.hex())
        tell("durable", snapshots.durable or 0)
        snapshots.step_done(step + 1)
    snapshots.close()
    tell("end", steps)


@dataclass
class Harness:
    training: Training
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
        if self.world > 1:
            pass
        log = os.open(self.root / "warm.log", os.O_WRONLY | os.O_CREAT)
        kind = "full" if self.world > 1 else self.training.kind
        for steps in (EVERY, EVERY + 1):
            live(Training(kind, self.training.lora), self.root / "warm", log, steps, Files(), 0, 1, "")
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
        while not (log.exists() and sum(w[1] == "end" for w in _words(log)) == self.world):
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
                    live(self.training, folder, handle, self.steps, files, rank, self.world, store)
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


def load_lora(folder: Path) -> nn.Module:
    """The real model in FP8 with LoRA on two layers."""
    from octavo.formats.recipe import Recipe
    from octavo.integrations.peft import get_peft_model, lora_config
    from octavo.integrations.transformers import load

    base = load(folder, Recipe.named("channel"), device="cpu", dtype=torch.float32)
    torch.manual_seed(0)
    names = [f"layers.{i}.self_attn.{part}_proj" for i in (0, 29) for part in ("q", "v")]
    model = get_peft_model(base, lora_config(base, rank=8, alpha=16, dropout=0.1, target_modules=names))
    return model.train()


def run(kills: int, kind: str, root: Path, seed: int = 0, lora: nn.Module | None = None) -> dict:
    torch.set_num_threads(1)
    world = 2 if kind == "sharded" else 1
    harness = Harness(Training(kind, lora), root, 9 if lora else 24, world, random.Random(seed))
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
    parser.add_argument("--model", choices=["full", "sharded", "lora"], default="full")
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
