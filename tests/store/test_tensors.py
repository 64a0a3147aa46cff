"""Checkpoint: reads what safetensors wrote, and names what is wrong with anything else."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from octavo.base.errors import CheckpointError
from octavo.store.raw_header import INDEX
from octavo.store.tensors import Checkpoint, safe_relative
from tests.store.conftest import CONFIG, gaussian, write_checkpoint

SECOND = "model-00002-of-00002.safetensors"


def test_reads_every_tensor(two_shards):
    folder, tensors = two_shards
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.names()) == set(tensors) == set(checkpoint)
    assert len(checkpoint) == len(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.dtype(name) == tensor.dtype
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.get(name), tensor)
    assert torch.equal(checkpoint.rows("a.weight", 3, 99), tensors["a.weight"][3:])
    assert checkpoint.file_of("b.weight") == SECOND
    assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())
    assert checkpoint.config == CONFIG
    assert checkpoint.layers == 1
    assert checkpoint.shapes()["b.weight"] == (4, 6)
    assert len(checkpoint.files) == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bool])
def test_dtypes(tmp_path, dtype):
    data = torch.randint(0, 2, (3, 5), dtype=torch.uint8)
    write_checkpoint(tmp_path, [{"x": data.view(dtype)}])
    assert torch.equal(Checkpoint.open(tmp_path).get("x").view(torch.uint8), data)


def test_writing_to_a_view_leaves_the_file_alone(two_shards):
    folder, tensors = two_shards
    Checkpoint.open(folder).get("a.weight").zero_()
    assert torch.equal(Checkpoint.open(folder).get("a.weight"), tensors["a.weight"])


def test_tensor_at_an_odd_offset(tmp_path):
    header = json.dumps(
        {
            "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "x": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
    ).encode()
    data = bytes([1, 2, 3]) + struct.pack("<ff", 1.5, -2.0)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (tmp_path / "config.json").write_text("{}")
    assert Checkpoint.open(tmp_path).get("x").tolist() == [1.5, -2.0]


def test_without_an_index_other_weights_are_left_alone(tmp_path):
    write_checkpoint(tmp_path, [{"a": gaussian(2, 2)}, {"b": gaussian(2, 2)}], index=False)
    save_file({"a": gaussian(2, 2)}, tmp_path / "consolidated.safetensors")
    save_file({"lora": gaussian(2, 2)}, tmp_path / "adapter_model.safetensors")
    assert set(Checkpoint.open(tmp_path).names()) == {"a", "b"}


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_text_config_of_a_wrapper(tmp_path, key):
    write_checkpoint(tmp_path, [{"a": gaussian(2, 2)}], config={key: {"num_hidden_layers": 7}})
    assert Checkpoint.open(tmp_path).layers == 7


def test_unknown_tensor(two_shards):
    with pytest.raises(CheckpointError, match="tensor nothing"):
        Checkpoint.open(two_shards[0]).get("nothing")


def cut(path, size):
    os.truncate(path, size)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_header(path, change):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = change(data[8 : 8 + length].decode().rstrip())
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])


def spoil_header(old, new):
    return lambda folder: edit_header(folder / SECOND, lambda text: text.replace(old, new))


def into_index(**changes):
    return lambda folder: edit_index(folder, lambda table: table.update(changes))


def make_pickle(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def make_gguf(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "model.gguf").write_bytes(b"x")


def twice(folder):
    save_file({"a.weight": gaussian(8, 16), "b.weight": gaussian(4, 6)}, folder / SECOND)


BROKEN = {
    "half-a-header": (lambda f: cut(f / SECOND, 30), "truncated", SECOND),
    "no-header": (lambda f: cut(f / SECOND, 5), "truncated", SECOND),
    "half-the-data": (lambda f: cut(f / SECOND, os.path.getsize(f / SECOND) - 1), "truncated", "b.weight"),
    "trailing-bytes": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes() + b"123"), "bad-header", SECOND),
    "not-safetensors": (lambda f: (f / SECOND).write_bytes(b"PK\x03\x04" * 40), "bad-header", SECOND),
    "not-json": (spoil_header("{", "["), "bad-header", SECOND),
    "a-list": (lambda f: edit_header(f / SECOND, lambda text: "[1]"), "bad-header", SECOND),
    "wrong-shape": (spoil_header("[4,6]", "[4,7]"), "bad-header", "b.weight"),
    "negative-shape": (spoil_header("[4,6]", "[4,-6]"), "bad-header", "b.weight"),
    "no-shape": (spoil_header('"shape":[4,6],', ""), "bad-header", "b.weight"),
    "a-hole": (spoil_header("[0,96]", "[4,100]"), "bad-header", SECOND),
    "unknown-dtype": (spoil_header('"F32","shape":[4', '"F31","shape":[4'), "bad-dtype", "b.weight"),
    "shape-is-true": (spoil_header("[4,6]", "[4,true]"), "bad-header", "b.weight"),
    "shape-is-a-text": (spoil_header("[4,6]", '""'), "bad-header", "b.weight"),
    "dtype-is-a-list": (spoil_header('"F32","shape":[4', '["F32"],"shape":[4'), "bad-dtype", "b.weight"),
    "metadata-is-a-number": (spoil_header('"format":"pt"', '"format":1'), "bad-header", SECOND),
    "listed-twice": (
        spoil_header('{"dtype":"F32","shape":[0', '{"dtype":"F32","dtype":"F32","shape":[0'),
        "duplicate",
        SECOND,
    ),
    "in-two-shards": (twice, "duplicate", "a.weight"),
    "missing-shard": (lambda f: (f / SECOND).unlink(), "missing-shard", SECOND),
    "unreadable-index": (lambda f: (f / INDEX).write_text("{"), "bad-json", INDEX),
    "index-is-a-list": (lambda f: (f / INDEX).write_text("[]"), "bad-json", INDEX),
    "index-without-table": (lambda f: (f / INDEX).write_text("{}"), "bad-index", INDEX),
    "index-leaves-folder": (into_index(x="../other/model.safetensors"), "unsafe-path", "x"),
    "index-absolute": (into_index(x="/etc/model.safetensors"), "unsafe-path", "x"),
    "index-number": (into_index(x=3), "unsafe-path", "x"),
    "index-names-pickle": (into_index(x="pytorch_model.bin"), "pickle", "pytorch_model.bin"),
    "index-lists-absent": (into_index(**{"b.scale": SECOND}), "index-mismatch", "b.scale"),
    "index-wrong-shard": (into_index(**{"a.weight": SECOND}), "index-mismatch", "a.weight"),
    "pickle-only": (make_pickle, "pickle", "pytorch_model.bin"),
    "gguf-only": (make_gguf, "gguf", "model.gguf"),
    "no-config": (lambda f: (f / "config.json").unlink(), "no-config", "config.json"),
    "config-is-broken": (lambda f: (f / "config.json").write_text('{"a": '), "bad-json", "config.json"),
    "config-is-binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "bad-json", "config.json"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder(two_shards, case):
    """Raised with the name of the file or tensor at fault when strict, collected otherwise."""
    folder, _ = two_shards
    spoil, code, where = BROKEN[case]
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    problems = Checkpoint.open(folder, strict=False).problems
    assert code in [problem.code for problem in problems]
    assert any(where in problem.where for problem in problems if problem.code == code)
    assert next(problem for problem in problems if problem.fatal).where in str(caught.value)


def test_not_strict_keeps_what_is_readable(two_shards):
    folder, tensors = two_shards
    cut(folder / SECOND, os.path.getsize(folder / SECOND) - 1)
    checkpoint = Checkpoint.open(folder, strict=False)
    assert "b.weight" not in checkpoint
    assert torch.equal(checkpoint.get("a.weight"), tensors["a.weight"])


def test_tensor_missing_from_the_index_is_harmless(two_shards):
    """Engines read whole shards: the tensor is there, and the log says so."""
    folder, tensors = two_shards
    edit_index(folder, lambda table: table.pop("a.bias"))
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.get("a.bias"), tensors["a.bias"])
    assert [p.code for p in checkpoint.problems] == ["index-mismatch"]


def test_unreadable_file(two_shards, monkeypatch):
    def refuse(path, file):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("octavo.store.tensors.read_header", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        Checkpoint.open(two_shards[0])


def test_missing_and_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="nothing there"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="a file"):
        Checkpoint.open(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "empty")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x", "", "a\\..\\x", None, "a\0b"])
def test_unsafe_paths(path):
    assert not safe_relative(path)


@pytest.mark.parametrize("path", ["model.safetensors", "sub/model.safetensors", "..model.safetensors"])
def test_safe_paths(path):
    assert safe_relative(path)
