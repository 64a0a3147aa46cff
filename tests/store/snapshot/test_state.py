"""Shards on two ranks, read by one; tied weights; plain DCP reads a snapshot; agreement between ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo.store.snapshot.state import TrainingState
from tests.store.snapshot.conftest import make_state, train

ROOT = Path(__file__).parents[3]


def test_tied_weights_are_stored_once_and_plain_values_come_back(new):
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainingState(model, optimizer)
    assert list(state.weights()) == ["embed.weight"]
    model["head"](model["embed"](torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    optimizer.state[model["embed"].weight]["calls"] = 3  # as some optimizers count
    snapshots = new(every=1)
    snapshots.start(state)
    snapshots.save(1)
    snapshots.close()
    want = optimizer.state[model["embed"].weight]["momentum_buffer"].clone()
    optimizer.state.clear()
    again = new(every=1)
    assert again.start(state) == 1
    again.close()
    found = optimizer.state[model["embed"].weight]
    assert torch.equal(found["momentum_buffer"], want) and found["calls"] == 3


def test_the_layout_is_made_once_while_tensors_stay(new):
    snapshots, state = new(), make_state()
    train(state, snapshots, snapshots.start(state), 4)
    first = state.layout("full", 0, 1)
    assert state.layout("full", 0, 1) is first
    moments = next(iter(state.optimizer.state.values()))
    moments["exp_avg"] = moments["exp_avg"].clone()
    assert state.layout("full", 0, 1) is not first
    snapshots.close()


@pytest.mark.slow
def test_two_ranks_write_and_one_reads(tmp_path):
    """FSDP2 and DDP on gloo: agreed resume, a broken file found by the other rank, shards read by plain DCP."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("ranks_check.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    from tests.store.snapshot import ranks_check

    for kind in ("fsdp", "ddp"):
        want = torch.load(tmp_path / f"{kind}.pt", weights_only=True)  # written by the check itself, whole tensors
        model, optimizer = ranks_check.build()
        state = TrainingState(model, optimizer)
        folder = tmp_path / kind / "step-3"
        manifest = json.loads((folder / "manifest.json").read_text())["snapshot"]
        assert manifest["world"] == 2
        assert [n for n in manifest["files"] if n.startswith("model")] == [
            f"model-0000{i}-of-00002.safetensors" for i in (1, 2)
        ]
        state.load(folder, 0, 1, 2)
        assert all(torch.equal(p.detach(), want[name]) for p, name in state.names.items())
        for p, name in state.names.items():
            assert torch.equal(optimizer.state[p]["exp_avg"], want[f"{name}.exp_avg"])
            assert float(optimizer.state[p]["step"]) == 3


def test_plain_dcp_reads_a_snapshot(new):
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    snapshots, state = new(), make_state()
    train(state, snapshots, snapshots.start(state), 2)
    snapshots.close()
    into = {name: torch.zeros_like(p) for p, name in state.names.items()}
    load(into, storage_reader=HuggingFaceStorageReader(str(snapshots.path / "step-2")), no_dist=True)
    assert all(torch.equal(into[name], p) for p, name in state.names.items())
