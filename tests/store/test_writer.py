"""ShardWriter: what it writes, the safetensors library reads; nothing looks finished before it is."""

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from octavo.base.errors import CheckpointError, ShapeError
from octavo.store.raw_header import INDEX
from octavo.store.tensors import Checkpoint
from octavo.store.writer import ShardWriter, plan_shards, write_tensors
from tests.store.conftest import gaussian

TENSORS = {
    "codes": torch.arange(15, dtype=torch.uint8).reshape(3, 5).view(torch.float8_e4m3fn),
    "scale": gaussian(3, 1, dtype=torch.float32),
    "scalar": torch.tensor(2.5),
    "norm": gaussian(7),
    "empty": torch.empty(0, 4),
    "wide": torch.tensor([1, 2], dtype=torch.int64),
}


def as_bytes(tensor):
    return tensor if tensor.dtype != torch.float8_e4m3fn else tensor.view(torch.uint8)


def test_one_file_reads_back(tmp_path):
    assert write_tensors(tmp_path, TENSORS) == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert not (tmp_path / INDEX).exists()


def test_every_tensor_is_aligned_to_its_size(tmp_path):
    write_tensors(tmp_path, TENSORS)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint:
        assert checkpoint.info(name).begin % checkpoint.dtype(name).itemsize == 0, name


def test_shards_and_index(tmp_path):
    files = write_tensors(tmp_path, TENSORS, max_shard_size=20)
    assert len(files) > 2
    index = json.loads((tmp_path / INDEX).read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(as_bytes(checkpoint.get(name)), as_bytes(tensor)), name


def test_plan_keeps_order_and_size():
    entries = {f"t{i}": (torch.float32, (10,)) for i in range(5)} | {"big": (torch.float32, (1000,))}
    plan = plan_shards(entries, 100)
    assert list(plan.values()) == [["t0", "t1"], ["t2", "t3"], ["t4"], ["big"]]
    assert next(iter(plan)) == "model-00001-of-00004.safetensors"


def test_slices_in_any_order(tmp_path):
    whole = gaussian(10, 4)
    writer = ShardWriter(tmp_path, {"x": (whole.dtype, (10, 4))})
    writer.open_shard("model.safetensors")
    for start in (6, 0, 3):
        writer.put("x", whole[start : start + (4 if start == 6 else 3)], start)
    assert not (tmp_path / "model.safetensors").exists()
    writer.sync("model.safetensors")
    writer.finish_shard("model.safetensors")
    writer.finish()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], whole)


def test_done_means_complete(tmp_path):
    write_tensors(tmp_path, {"x": gaussian(4, 4)})
    writer = ShardWriter(tmp_path, {"x": (torch.bfloat16, (4, 4))})
    assert writer.done("model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 20)
    assert not writer.done("model.safetensors")
    with pytest.raises(CheckpointError, match="unfinished"):
        writer.finish()


@pytest.mark.parametrize(
    ("data", "row"),
    [(gaussian(2, 5), 0), (gaussian(2, 4), 3), (gaussian(2, 4, dtype=torch.float32), 0), (gaussian(4), 0)],
    ids=["columns", "past-the-end", "dtype", "dimensions"],
)
def test_wrong_slice(tmp_path, data, row):
    writer = ShardWriter(tmp_path, {"x": (torch.bfloat16, (4, 4))})
    writer.open_shard("model.safetensors")
    with pytest.raises(ShapeError, match="write of x"):
        writer.put("x", data, row)
    writer.close()


@pytest.mark.parametrize(("code", "raised"), [(errno.EOPNOTSUPP, False), (errno.ENOSPC, True)])
def test_reserving_space(tmp_path, monkeypatch, code, raised):
    """A file system that cannot reserve is no reason to stop; a full one is, before any work is done."""

    def fail(handle, offset, size):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    if raised:
        with pytest.raises(OSError, match="No space"):
            write_tensors(tmp_path, TENSORS)
        assert not (tmp_path / "model.safetensors").exists()
    else:
        write_tensors(tmp_path, TENSORS)
        assert len(load_file(tmp_path / "model.safetensors")) == len(TENSORS)
