import json

import pytest
import torch
from safetensors.torch import save_file

from octavo.base.errors import CheckpointError, MismatchError
from octavo.store.manifest import fingerprint
from octavo.store.moments import INDEX, Moments, MomentsWriter


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": torch.randn(4, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def write(folder, model):
    writer = MomentsWriter(folder)
    a, b = torch.randn(4, 4), torch.randn(6, 6)
    writer.add({"l0.qkv_proj": a}, {"l0.qkv_proj": ["l0.q_proj", "l0.k_proj"]})
    writer.add({"l0.o_proj": b}, {"l0.o_proj": ["l0.o_proj"]})
    writer.finish(model_fingerprint=fingerprint(model), data_fingerprint="d", tokens=9, weighting="none")
    return a, b


def test_round_trip(tmp_path, model):
    a, b = write(tmp_path / "m", model)
    moments = Moments.open(tmp_path / "m", model=model)
    assert torch.equal(moments.get("l0.q_proj"), a) and torch.equal(moments.get("l0.k_proj"), a)
    assert torch.equal(moments.get("l0.o_proj"), b)
    assert moments.key("l0.q_proj") == moments.key("l0.k_proj")
    assert "l0.v_proj" not in moments and moments.index.tokens == 9


def test_a_killed_run_leaves_nothing_that_opens(tmp_path, model):
    write(tmp_path / "m", model)
    MomentsWriter(tmp_path / "m").add({"x": torch.ones(2, 2)}, {"x": ["x"]})
    with pytest.raises(CheckpointError, match="octavo calibrate"):
        Moments.open(tmp_path / "m")


def test_another_model_is_refused(tmp_path, model):
    write(tmp_path / "m", model)
    save_file({"a.weight": torch.randn(4, 4)}, model / "model.safetensors")
    with pytest.raises(MismatchError, match="another model"):
        Moments.open(tmp_path / "m", model=model)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema_version": 9}, "schema_version"),
        ({"files": {"k": "../x"}}, "outside"),
        ({"surprise": 1}, "not readable"),
        ({"tokens": "many"}, "not readable"),
    ],
)
def test_bad_index(tmp_path, model, change, match):
    write(tmp_path / "m", model)
    path = tmp_path / "m" / INDEX
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=match):
        Moments.open(tmp_path / "m")


def test_damaged_files_are_named(tmp_path, model):
    write(tmp_path / "m", model)
    path = tmp_path / "m" / "moments-00001.safetensors"
    moments = Moments.open(tmp_path / "m")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="moments-00001"):
        moments.get("l0.q_proj")
    path.unlink()
    with pytest.raises(CheckpointError, match="moments-00001"):
        moments.get("l0.q_proj")


def test_matrices_of_another_type_are_refused(tmp_path, model):
    write(tmp_path / "moments", model)
    moments = Moments.open(tmp_path / "moments")
    module = next(iter(moments.index.modules))
    file = tmp_path / "moments" / moments.index.files[moments.key(module)]
    save_file({moments.key(module): moments.get(module).double()}, file)
    with pytest.raises(CheckpointError, match="no float32 tensor"):
        moments.get(module)
