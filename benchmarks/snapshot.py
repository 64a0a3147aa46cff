"""How long training stands still for a snapshot, and how fast it is written: a table, then one line of JSON.

    python benchmarks/snapshot.py [--gigabytes 12] [--device cuda] [--folder DIR] [--rounds 3] [--only NAME ...]

All in one run, same tensors: AdamW state (parameters, two moments, float32) of the given size, training steps of matrix
multiplications between snapshots. Rivals: torch.save; safetensors.save_file of a copy in host memory, as it comes and
with the fsync that Octavo's files get; dcp.save; dcp.async_save as it comes and with the pinned asynchronous
DefaultStager; the bare pinned copy, which is what any copy
costs that waits. `stall` is what a step with a snapshot takes longer than the steps without one, from the end of one
optimizer step to the end of the next, the device synchronized; that optimizer step awaits Octavo's copy, so nothing is
left out. `lora` has the tensors of LoRA rank 16 on all linears of an 8B model. Needs a disk with room for
eight times the size. On a CPU it runs with a small size, to show that it runs; the stalls mean nothing there.

    python benchmarks/snapshot.py --resume-check

instead of all that: is a resumed run the undisturbed one, to the bit, with deterministic settings. Dropout, shuffled
rows, accumulation, a buffer that each forward changes, all weights or a few; the copy of a snapshot runs under the next
step. Exit code 1 if a loss or a weight differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.store.snapshot.snapshots import Snapshots
from octavo.store.snapshot.state import TrainingState

# Llama-3.1-8B: (out, in) of q, k, v, o, gate, up, down in each of 32 layers
LINEARS = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))


class Dense(nn.Module):
    """Square matrices, every one used: forward and backward read all parameters."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        width = 4096 if nbytes >= 1 << 30 else 256
        count = max(nbytes // 3 // (4 * width * width), 1)  # a third are parameters, the rest are moments
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width, device=device) * 0.01) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x

    @property
    def width(self) -> int:
        return self.weights[0].shape[0]


class Lora(nn.Module):
    """A and B of every linear of an 8B model over one shared frozen matrix: the adapter's tensors, not its compute."""

    def __init__(self, device: torch.device, layers: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(16, 16, device=device), requires_grad=False)
        pairs = [pair for _ in range(layers) for pair in LINEARS]
        self.a = nn.ParameterList(nn.Parameter(torch.randn(16, fan_in, device=device) * 0.01) for _, fan_in in pairs)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(fan_out, 16, device=device)) for fan_out, _ in pairs)
        self.width = 14336

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for a, b in zip(self.a, self.b, strict=True):
            total = total + (x[:, : a.shape[1]] @ a.T @ b.T).square().mean()
        return total


class Loop:
    """Training steps of a fixed size, timed from optimizer step to optimizer step."""

    def __init__(self, model: nn.Module, device: torch.device, rows: int) -> None:
        self.model, self.device = model, device
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        self.x = torch.randn(rows, model.width, device=device)
        for _ in range(3):
            self.step()

    def step(self, after: Callable[[], None] | None = None) -> float:
        """Seconds of what `after` does once the step before is over, and of a forward, backward and optimizer step."""
        sync(self.device)
        started = time.perf_counter()
        if after:
            after()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        sync(self.device)
        return time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for index, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
        return found


class Small(nn.Module):
    """A language model of two layers with dropout, and a norm whose statistics change in every forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden.flatten(0, 1)))
        return nn.functional.cross_entropy(logits[:-1], tokens.flatten()[1:])


def train(folder: Path, device: torch.device, width: int, partial: bool, begin: int, end: int) -> tuple[Any, ...]:
    """Steps begin+1 to end of one life of a run. Returns their losses and the weights at the end."""
    torch.manual_seed(0)
    model = Small(width).to(device)
    if partial:
        model.embed.requires_grad_(False)
        model.layers[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    rows = torch.randint(0, 64, (64, 128), generator=torch.Generator().manual_seed(1))
    snapshots = Snapshots(folder, every=4, signals=False)
    if (found := snapshots.start(TrainingState(model, optimizer))) != begin:
        raise SystemExit(f"continued from step {found}, not {begin}")
    losses = {}
    for step in range(begin, end):
        total = 0.0
        for _ in range(2):
            with sdpa_kernel(SDPBackend.MATH):  # the others' backward need not be deterministic
                loss = model(rows[torch.randperm(len(rows))[:8]].to(device)) / 2
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = total
        snapshots.step_done(step + 1)
    snapshots.close()
    weights = model.named_parameters() if partial else model.state_dict().items()
    return losses, {name: value.detach().clone() for name, value in weights}


def resume_check(folder: Path, device: torch.device) -> dict[str, Any]:
    """What differs between a run of 12 steps and one that ended after 7 and continued from its snapshot of step 6."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    width, found = 1024 if device.type == "cuda" else 64, {}
    for name, partial in (("all weights", False), ("some frozen", True)):
        straight, want = train(folder / f"{name} straight", device, width, partial, 0, 12)
        first, _ = train(folder / name, device, width, partial, 0, 7)
        second, got = train(folder / name, device, width, partial, 6, 12)
        differing = [step for step in straight if (second | first)[step] != straight[step]]
        differing += [step for step in second if second[step] != straight[step]]
        unequal = [key for key in want if not torch.equal(want[key], got[key])]
        found[name] = {"steps": sorted({*differing}), "weights": unequal}
        print(f"{name:12} losses that differ: {sorted({*differing}) or 'none'}; weights: {unequal or 'none'}")
    return found


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Octavo:
    def __init__(self, loop: Loop, folder: Path) -> None:
        self.snapshots = Snapshots(folder, every=0, keep_last=1, signals=False)
        self.snapshots.start(TrainingState(loop.model, loop.optimizer))
        started = time.perf_counter()
        self.snapshots._prepare()  # as step_done does beside the first steps
        self.prepared = time.perf_counter() - started
        self.count = 0

    def save(self) -> None:
        self.count += 1
        self.snapshots.save(self.count)

    def finish(self) -> float:
        self.snapshots.writer.drain()
        return float(self.snapshots.writer.seconds or 0.0)

    def close(self) -> None:
        self.snapshots.close()


class Rival:
    """A save that is done when it returns, or a future to wait for."""

    def __init__(self, action: Callable[[int], Any], close: Callable[[], None] = lambda: None) -> None:
        self.action, self.close, self.count = action, close, 0
        self.answer: Any = None

    def save(self) -> None:
        self.started = time.perf_counter()
        self.count += 1
        self.answer = self.action(self.count)

    def finish(self) -> float:
        answer = getattr(self.answer, "upload_completion", self.answer)
        if hasattr(answer, "result"):
            answer.result()
        return time.perf_counter() - self.started


def contestants(loop: Loop, folder: Path) -> dict[str, Callable[[], Any]]:
    def fresh(name: str, count: int) -> Path:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
        return folder / name / str(count)

    def host() -> dict[str, torch.Tensor]:
        return {name: value.detach().cpu() for name, value in loop.tensors().items()}

    def default_stager() -> Rival:
        gpu = loop.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=gpu, use_async_staging=gpu, use_non_blocking_copy=gpu
        )

        def save(count: int) -> Any:  # a stager a save: torch 2.11 empties the one it is given once the save is done
            folder = str(fresh("stager", count))
            return dcp.async_save(loop.tensors(), checkpoint_id=folder, async_stager=DefaultStager(options))

        return Rival(save)

    def pinned_copy() -> Rival:
        sources = [value for value in loop.tensors().values() if value.numel()]
        places = [torch.empty_like(v, device="cpu", pin_memory=loop.device.type == "cuda") for v in sources]

        def copy(count: int) -> None:
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=True)
            sync(loop.device)

        return Rival(copy)

    def durable(count: int) -> None:
        save_file(host(), path := fresh("durable", count))
        with path.open("rb") as file:
            os.fsync(file.fileno())

    return {
        "octavo": lambda: Octavo(loop, folder / "octavo"),
        "dcp.async_save, pinned DefaultStager": default_stager,
        "bare pinned copy": pinned_copy,
        "dcp.async_save": lambda: Rival(lambda n: dcp.async_save(loop.state(), checkpoint_id=str(fresh("async", n)))),
        "dcp.save": lambda: Rival(lambda n: dcp.save(loop.state(), checkpoint_id=str(fresh("dcp", n)))),
        "torch.save": lambda: Rival(lambda n: torch.save(loop.state(), fresh("torch", n))),
        "safetensors.save_file": lambda: Rival(lambda n: save_file(host(), fresh("safetensors", n))),
        "safetensors.save_file, fsync": lambda: Rival(durable),
    }


def measure(loop: Loop, folder: Path, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    found = []
    for name, make in contestants(loop, folder).items():
        if only and name.split()[0] not in only and name not in only:
            continue
        rival = make()
        stalls, writes, calls = [], [], []
        for number in range(rounds + 1):  # the first makes buffers
            quiet = statistics.median(loop.step() for _ in range(3))
            called = [0.0]

            def save(rival: Any = rival, called: list[float] = called) -> None:
                started = time.perf_counter()
                rival.save()
                called[0] = time.perf_counter() - started

            stall = loop.step(save) - quiet
            write = rival.finish()
            if number:
                stalls.append(stall)
                writes.append(write)
                calls.append(called[0])
        rival.close()
        prepared = {"prepare_s": round(rival.prepared, 3)} if hasattr(rival, "prepared") else {}
        found.append(
            {
                "name": name,
                "stall_s": round(statistics.median(stalls), 5),
                "stall_max_s": round(max(stalls), 5),
                "call_s": round(statistics.median(calls), 5),
                "until_durable_s": round(statistics.median(writes), 4),
                "step_s": round(quiet, 5),
                **prepared,
            }
        )
        print(
            "{name:40} stall {stall_s:9.4f} s (max {stall_max_s:.4f})   until on disk {until_durable_s:8.3f} s".format(
                **found[-1]
            )
        )
        shutil.rmtree(folder)
        folder.mkdir()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8192, help="of the batch; enough that the GPU sets the pace")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B model for lora")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--resume-check", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as root, contextlib.ExitStack() as stack:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
        result: dict[str, Any] = {"device": name, "torch": torch.__version__}
        if options.resume_check:
            result["resume_check"] = resume_check(Path(root), device)
            print(json.dumps(result))
            sys.exit(any(entry["steps"] or entry["weights"] for entry in result["resume_check"].values()))
        store = dist.FileStore(str(Path(root) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        work = Path(root) / "work"
        work.mkdir()
        result["gigabytes"] = options.gigabytes
        models = {
            "full": lambda: Dense(int(options.gigabytes * 1e9), device),
            "lora": lambda: Lora(device, options.layers),
        }
        for name, build in models.items():
            loop = Loop(build(), device, options.rows)
            nbytes = sum(value.numel() * value.element_size() for value in loop.tensors().values())
            print(f"{name}: {nbytes / 1e9:.3f} GB in {len(loop.tensors())} tensors on {result['device']}")
            result[name] = {"bytes": nbytes, "rows": measure(loop, work, options.rounds, options.only)}
            del loop
    print(json.dumps(result))


if __name__ == "__main__":
    main()
