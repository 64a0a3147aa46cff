"""scales.json serves the model it was made for, and no other."""

import json
import math

import pytest

from octavo.base.errors import CheckpointError, MismatchError
from octavo.store.manifest import fingerprint
from octavo.store.scales import KVScales, ModuleScales, Scales
from tests.store.conftest import gaussian, write_checkpoint


@pytest.fixture
def model(tmp_path):
    return write_checkpoint(tmp_path / "model", [{"a.weight": gaussian(4, 4)}])


@pytest.fixture
def path(tmp_path, model):
    module = ModuleScales(
        input_amax=3.5,
        input_scale=3.5 / 448,
        input_percentiles={"99.9": 3.0},
        weight_sqnr_db={"channel": 31.5, "tensor": math.inf},
        rank=1,
    )
    scales = Scales(
        model_fingerprint=fingerprint(model),
        data_fingerprint="sha256:data",
        samples=8,
        tokens=1024,
        modules={"a": module},
        kv={"model.layers.0.self_attn": KVScales(k_amax=1.0, v_amax=2.0, k_scale=1 / 448, v_scale=2 / 448)},
    )
    scales.write(tmp_path / "scales.json")
    return tmp_path / "scales.json"


def test_round_trip(path, model):
    scales = Scales.load(path, model=model, modules=["a"])
    assert scales.modules["a"].input_scale == 3.5 / 448
    assert scales.modules["a"].weight_sqnr_db == {"channel": 31.5, "tensor": None}
    assert scales.kv["model.layers.0.self_attn"].v_amax == 2.0


def test_another_model_is_refused(path, tmp_path):
    other = write_checkpoint(tmp_path / "other", [{"a.weight": gaussian(4, 4, seed=1)}])
    with pytest.raises(MismatchError, match="belongs to another model"):
        Scales.load(path, model=other)


def test_missing_modules_are_refused(path):
    with pytest.raises(MismatchError, match="nothing for b, c, d and 1 more"):
        Scales.load(path, modules=["a", "b", "c", "d", "e"])


def test_unseen_modules_are_called_so(path):
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "unseen": ["b"]}))
    with pytest.raises(MismatchError, match="nothing for b, c; no token reached 1 of them"):
        Scales.load(path, modules=["a", "b", "c"])


def spoil(change):
    def apply(path):
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return apply


BROKEN = {
    "absent": (lambda p: p.unlink(), "does not exist"),
    "not-json": (lambda p: p.write_text("{"), "not readable JSON"),
    "a-list": (lambda p: p.write_text("[]"), "schema_version"),
    "newer": (spoil(lambda v: v.update(schema_version=2)), "schema_version; got 2"),
    "wrong-type": (spoil(lambda v: v["modules"]["a"].update(input_amax="much")), "modules.a.input_amax"),
    "nan-scale": (spoil(lambda v: v["modules"]["a"].update(input_scale=math.nan)), "modules.a.input_scale"),
    "negative-scale": (spoil(lambda v: v["modules"]["a"].update(input_scale=-1.0)), "modules.a.input_scale"),
    "zero-scale": (spoil(lambda v: v["modules"]["a"].update(input_scale=0.0)), "modules.a.input_scale"),
    "scale-beyond-float32": (spoil(lambda v: v["modules"]["a"].update(input_scale=1e300)), "modules.a.input_scale"),
    "unknown-key": (spoil(lambda v: v.update(colour=1)), "colour"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(path, case):
    change, message = BROKEN[case]
    change(path)
    with pytest.raises(CheckpointError, match=message):
        Scales.load(path)
