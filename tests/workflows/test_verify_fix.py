"""--fix mends what needs no new number, leaves the numbers alone, and says what is left."""

import json

import pytest
import torch

from octavo.base.errors import CheckpointError, InputError
from octavo.store.tensors import Checkpoint
from octavo.workflows.verify import VerifyConfig, verify
from tests.workflows.broken import decoder, quantize

A0, M0 = "model.layers.0.self_attn", "model.layers.0.mlp"
Q = f"{A0}.q_proj"


def fix(folder, path, engine="vllm"):
    source = folder.write(path / "broken")
    return verify(VerifyConfig(folder=source, engine=engine, gpu="sm90", fix=path / "fixed"))


def reshape(leaf, *shape):
    def change(f):
        f.tensors = {n: x.reshape(shape) if n.endswith(leaf) else x for n, x in f.tensors.items()}

    return change


def drop_row_axis(f):
    f.tensors = {n: x[:, 0] if n.endswith("weight_scale") else x for n, x in f.tensors.items()}


def weights(f):
    return f.quant["config_groups"]["group_0"]["weights"]


MENDABLE = {
    "native named ct": ("block", lambda f: f.rename("_scale_inv", "_scale"), "renamed to weight_scale_inv"),
    "ct named native": ("ct-block", lambda f: f.rename("_scale", "_scale_inv"), "renamed to weight_scale"),
    "activation_scale": ("static", lambda f: f.rename("input_scale", "activation_scale"), "renamed to input_scale"),
    "scale 1-d": ("ct-channel", drop_row_axis, "shapes of weight_scale"),
    "scalar 1x1": ("ct-tensor", reshape("weight_scale", 1, 1), "shapes of weight_scale"),
    "no block size": ("block", lambda f: f.quant.pop("weight_block_size"), "weight_block_size added"),
    "block and static": ("block", lambda f: f.quant.update(activation_scheme="static"), "activation_scheme"),
    "no activation scheme": ("block", lambda f: f.quant.pop("activation_scheme"), "activation_scheme"),
    "unknown key": ("ct-channel", lambda f: weights(f).update(odd=1), "key odd removed"),
    "actorder": ("ct-channel", lambda f: weights(f).update(actorder="group"), "actorder"),
    "wrong format": ("ct-channel", lambda f: f.quant.update(format="pack-quantized"), "format"),
}


@pytest.mark.parametrize("name", MENDABLE)
def test_mended_without_touching_a_number(name, tmp_path):
    kind, change, said = MENDABLE[name]
    folder = quantize(decoder("qwen3"), kind)
    change(folder)
    report = fix(folder, tmp_path)
    assert report.verdict == "error"
    assert report.fixed_verdict == "ok"
    assert any(said in text for text in report.changes), report.changes
    before, after = Checkpoint.open(tmp_path / "broken"), Checkpoint.open(tmp_path / "fixed")
    weight = f"{Q}.weight"
    assert torch.equal(before.get(weight).view(torch.uint8), after.get(weight).view(torch.uint8))


def test_skip_list_with_full_names(tmp_path):
    folder = quantize(decoder("qwen3"), "block", keep=[f"{A0}.o_proj"], skip=["lm_head", "o_proj"])
    report = fix(folder, tmp_path, "all")
    assert (report.verdict, report.fixed_verdict) == ("error", "ok")
    config = json.loads((tmp_path / "fixed" / "config.json").read_text())
    assert f"{A0}.o_proj" in config["quantization_config"]["modules_to_not_convert"]


def test_head_targeted_by_name(tmp_path):
    folder = decoder("qwen3")
    folder.linears.append("lm_head")
    report = fix(quantize(folder, "ct-channel", skip=[]), tmp_path)
    assert (report.verdict, report.fixed_verdict) == ("error", "ok"), report.changes


def test_index_rebuilt(tmp_path):
    folder = quantize(decoder("qwen3", layers=2), "block")
    last = folder.two_shards(lambda n: "layers.1" in n)[1]
    folder.index = {n: f for n, f in folder.index.items() if f != last}
    report = fix(folder, tmp_path)
    assert (report.verdict, report.fixed_verdict) == ("error", "ok")
    assert any(last in text for text in report.changes)


def test_a_config_with_half_a_surrogate_pair(tmp_path):
    folder = quantize(decoder("qwen3"), "block")
    folder.quant.pop("activation_scheme")
    folder.config["odd"] = "\ud800"
    assert fix(folder, tmp_path).fixed_verdict == "ok"


def test_what_needs_new_numbers_stays_an_error(tmp_path):
    folder = quantize(decoder("qwen3"), "block")
    del folder.tensors[f"{Q}.weight_scale_inv"]
    assert fix(folder, tmp_path).fixed_verdict == "error"


def test_damaged_files_and_taken_folders_are_refused(tmp_path):
    path = quantize(decoder("qwen3"), "block").write(tmp_path / "broken")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(InputError):
        verify(VerifyConfig(folder=path, gpu="sm90", fix=tmp_path / "taken"))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        verify(VerifyConfig(folder=path, gpu="sm90", fix=tmp_path / "fixed"))
    assert not (tmp_path / "fixed").exists()
