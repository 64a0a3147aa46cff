"""ct <-> native: the same codes and scales under other names, and back to the same bytes."""

import pytest
import torch

from octavo.base.errors import CheckpointError, ConfigError
from octavo.formats.recipe import Recipe
from octavo.store import schema
from octavo.store.conversion import convert_checkpoint
from octavo.store.relayout import relayout
from octavo.store.scales import ModuleScales, Scales
from octavo.store.tensors import Checkpoint
from tests.store.conftest import CONFIG, gaussian, write_checkpoint

AT = "model.layers.0"
TENSORS = {
    "model.embed_tokens.weight": gaussian(32, 256),
    f"{AT}.self_attn.o_proj.weight": gaussian(200, 256, seed=1),
    f"{AT}.mlp.down_proj.weight": gaussian(256, 384, seed=2),
    f"{AT}.input_layernorm.weight": gaussian(256, seed=3),
}
MODULES = [f"{AT}.self_attn.o_proj", f"{AT}.mlp.down_proj"]


@pytest.fixture
def bf16(tmp_path):
    folder = write_checkpoint(tmp_path / "bf16", [TENSORS])
    (folder / "tokenizer.json").write_text("{}")
    return Checkpoint.open(folder)


def same_bytes(a, b):
    assert a.names() and set(a.names()) == set(b.names())
    for name in a:
        assert a.dtype(name) == b.dtype(name) and a.shape(name) == b.shape(name), name
        x, y = a.get(name), b.get(name)
        assert torch.equal(x.view(torch.uint8) if x.ndim else x, y.view(torch.uint8) if y.ndim else y), name


@pytest.mark.parametrize("scheme", ["block128", "tensor"])
def test_there_and_back(tmp_path, bf16, scheme):
    convert_checkpoint(bf16, tmp_path / "ct", Recipe.named(scheme))
    convert_checkpoint(bf16, tmp_path / "native", Recipe.named(scheme), layout="native")
    ct, native = Checkpoint.open(tmp_path / "ct"), Checkpoint.open(tmp_path / "native")
    summary = relayout(ct, tmp_path / "to-native", "native")
    assert sorted(summary.quantized) == sorted(MODULES)
    relayout(native, tmp_path / "to-ct", "ct", max_shard_size=100_000)
    same_bytes(Checkpoint.open(tmp_path / "to-native"), native)
    same_bytes(Checkpoint.open(tmp_path / "to-ct"), ct)
    assert Checkpoint.open(tmp_path / "to-native").config == native.config
    assert Checkpoint.open(tmp_path / "to-ct").config == ct.config
    assert (tmp_path / "to-ct" / "tokenizer.json").exists()


def test_static_input_scales_change_shape(tmp_path, bf16):
    modules = {m: ModuleScales(input_amax=1.0, input_scale=0.02) for m in MODULES}
    scales = Scales(model_fingerprint="m", data_fingerprint="d", samples=1, tokens=1, modules=modules)
    recipe = Recipe.named("tensor", activation="static")
    convert_checkpoint(bf16, tmp_path / "ct", recipe, scales=scales)
    relayout(Checkpoint.open(tmp_path / "ct"), tmp_path / "native", "native")
    native = Checkpoint.open(tmp_path / "native")
    assert native.shape(f"{MODULES[0]}.input_scale") == ()
    assert native.config["quantization_config"]["activation_scheme"] == "static"


def test_bf16_scales_widen_to_the_same_values(tmp_path, bf16):
    convert_checkpoint(bf16, tmp_path / "ct", Recipe.named("block128"), compat="llmcompressor")
    ct = Checkpoint.open(tmp_path / "ct")
    relayout(ct, tmp_path / "native", "native")
    native = Checkpoint.open(tmp_path / "native")
    for module in MODULES:
        stored = native.get(f"{module}.weight_scale_inv")
        assert stored.dtype == torch.float32
        assert torch.equal(stored, ct.get(f"{module}.weight_scale").float())


def test_channel_scales_do_not_fit_native(tmp_path, bf16):
    convert_checkpoint(bf16, tmp_path / "ct", Recipe.named("channel"))
    with pytest.raises(ConfigError, match="one scale per channel"):
        relayout(Checkpoint.open(tmp_path / "ct"), tmp_path / "native", "native")


def test_two_kinds_of_scales_do_not_fit_native(tmp_path):
    tensors = {**TENSORS, f"{AT}.mlp.up_proj.weight": gaussian(128, 320)}
    source = Checkpoint.open(write_checkpoint(tmp_path / "bf16", [tensors]))
    convert_checkpoint(source, tmp_path / "ct", Recipe.named("block128"))
    with pytest.raises(ConfigError, match="two kinds"):
        relayout(Checkpoint.open(tmp_path / "ct"), tmp_path / "native", "native")
    assert not (tmp_path / "native").exists()


def test_sixteen_bit_input(tmp_path, bf16):
    with pytest.raises(CheckpointError, match="no FP8 weights"):
        relayout(bf16, tmp_path / "out", "ct")


def test_missing_scale_is_named(tmp_path):
    codes = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    source = Checkpoint.open(write_checkpoint(tmp_path / "m", [{f"{AT}.mlp.up_proj.weight": codes}], config))
    with pytest.raises(CheckpointError, match=r"up_proj.*without a scale"):
        relayout(source, tmp_path / "out", "ct")
    assert schema.parse_quantization_config(config).layout == "native"
