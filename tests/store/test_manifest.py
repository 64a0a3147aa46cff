"""The fingerprint knows the model, not its sharding; the manifest survives the disk."""

import json

import pytest
import torch

from octavo.base.errors import CheckpointError
from octavo.formats.recipe import Recipe
from octavo.store.manifest import MANIFEST, Manifest, describe_files, fingerprint
from octavo.store.tensors import Checkpoint
from tests.store.conftest import gaussian, write_checkpoint

TENSORS = {"a": gaussian(64, 64), "b": gaussian(3, seed=1), "e": torch.empty(0)}


def test_sharding_and_config_do_not_matter(tmp_path):
    one = write_checkpoint(tmp_path / "one", [TENSORS])
    parts = [{"b": TENSORS["b"]}, {"a": TENSORS["a"], "e": TENSORS["e"]}]
    two = write_checkpoint(tmp_path / "two", parts, config={"other": 1})
    assert fingerprint(one) == fingerprint(two) == fingerprint(Checkpoint.open(two))
    assert fingerprint(one).startswith("sha256:")


@pytest.mark.parametrize(
    "change",
    [
        {"a": gaussian(64, 64, seed=9)},
        {"b": TENSORS["b"].clone().fill_(1)},
        {"a": TENSORS["a"].reshape(32, 128)},
        {"a": TENSORS["a"].view(torch.float16)},
        {"c": gaussian(2)},
    ],
    ids=["values", "small-tensor", "shape", "dtype", "name"],
)
def test_changes_show(tmp_path, change):
    one = write_checkpoint(tmp_path / "one", [TENSORS])
    two = write_checkpoint(tmp_path / "two", [{**TENSORS, **change}])
    assert fingerprint(one) != fingerprint(two)


def test_first_and_last_bytes_count(tmp_path):
    prints = set()
    for place in (None, 0, -1):
        changed = TENSORS["a"].clone()
        if place is not None:
            changed.view(-1)[place] += 1
        prints.add(fingerprint(write_checkpoint(tmp_path / str(place), [{"a": changed}])))
    assert len(prints) == 3


def test_manifest_round_trip(tmp_path):
    folder = write_checkpoint(tmp_path, [TENSORS])
    manifest = Manifest.collect("octavo quantize", recipe=Recipe.named("block128"), folder=folder, source="sha256:x")
    manifest.write(folder / MANIFEST)
    back = Manifest.load(folder)
    assert back == manifest
    assert back.versions["torch"] == torch.__version__.split("+")[0] or back.versions["torch"] == torch.__version__
    assert back.recipe["rule"] == "e4m3 block128x128"
    assert "model.safetensors" in back.files and len(back.files["config.json"].split()) == 2
    assert MANIFEST not in describe_files(folder)


def test_damaged_manifest(tmp_path):
    with pytest.raises(CheckpointError, match=MANIFEST):
        Manifest.load(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"colour": 1}))
    with pytest.raises(CheckpointError, match=MANIFEST):
        Manifest.load(tmp_path)
