"""What trains in the tests of killed runs: small models, and one life of a training process, with its writer forked."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from octavo.store.snapshot.files import Files
from octavo.store.snapshot.snapshots import Snapshots
from octavo.store.snapshot.state import TrainingState
from octavo.store.snapshot.worker import serve

EVERY = 3


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
