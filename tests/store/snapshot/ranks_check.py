"""Run by torchrun on 2 gloo ranks: snapshots of FSDP2 and DDP, resumed together, a broken one rejected together."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.snapshots import Snapshots
from octavo.store.snapshot.state import TrainingState


def build(kind=""):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))  # uneven, and less than ranks
    if kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    return wrapped, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(tensor):
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


def run(kind, folder, until):
    model, optimizer = build(kind)
    state = TrainingState(model, optimizer)
    torch.manual_seed(dist.get_rank())
    snapshots = Snapshots(folder, every=6, signals=False)
    begin, losses = snapshots.start(state), {}
    for step in range(begin, until):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
        snapshots.step_done(step + 1)
    snapshots.close()
    dist.barrier()
    return begin, losses, state


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, root = dist.get_rank(), Path(sys.argv[1])
    for kind in ("fsdp", "ddp"):
        _, straight, _ = run(kind, root / f"{kind}-straight", 8)
        begin, first, state = run(kind, root / kind, 3)
        found = {name: whole(p) for p, name in state.names.items()}
        found |= {f"{name}.exp_avg": whole(state.optimizer.state[p]["exp_avg"]) for p, name in state.names.items()}
        if rank == 0:
            torch.save(found, root / f"{kind}.pt")
        begin, second, _ = run(kind, root / kind, 8)
        assert begin == 3 and first | second == straight, (begin, first, second, straight)
        folder = SnapshotFolder(root / kind)
        assert folder.steps() == [3, 6]
        if rank == 0:
            path = sorted(folder.at(6).glob("model*"))[-1]
            path.write_bytes(path.read_bytes()[:-1])
        dist.barrier()
        begin, third, _ = run(kind, root / kind, 5)
        assert begin == 3 and all(third[s] == straight[s] for s in third)
        assert folder.steps() == [3] and len(list(folder.path.glob(".bad-step-6*"))) == 1
    print(f"rank {rank} ok", flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
