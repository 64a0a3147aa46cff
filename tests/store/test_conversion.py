"""Conversion end to end on small checkpoints: bytes against the oracle, names, copies, and all that must be refused."""

import json
import os
import shutil

import pytest
import torch

from octavo.base.errors import CheckpointError, ConfigError, InputError, MismatchError
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.scale import is_power_of_two
from octavo.formats.spec import E4M3
from octavo.store import schema, slices
from octavo.store.conversion import convert_checkpoint
from octavo.store.manifest import MANIFEST, Manifest, fingerprint
from octavo.store.raw_header import INDEX
from octavo.store.scales import ModuleScales, Scales
from octavo.store.tensors import Checkpoint
from tests.store.conftest import CONFIG, gaussian, write_checkpoint

L = "model.layers.0"
ATTENTION, MLP = f"{L}.self_attn", f"{L}.mlp"
SHAPES = {
    "model.embed_tokens.weight": (96, 256),
    f"{ATTENTION}.q_proj.weight": (256, 256),
    f"{ATTENTION}.q_proj.bias": (256,),
    f"{ATTENTION}.k_proj.weight": (128, 256),
    f"{ATTENTION}.v_proj.weight": (128, 256),
    f"{ATTENTION}.o_proj.weight": (200, 256),
    f"{MLP}.gate_proj.weight": (384, 256),
    f"{MLP}.up_proj.weight": (384, 256),
    f"{MLP}.down_proj.weight": (256, 320),
    f"{L}.input_layernorm.weight": (256,),
    "lm_head.weight": (96, 256),
}
LINEARS = [name.removesuffix(".weight") for name in SHAPES if name.endswith("_proj.weight")]
QKV = [f"{ATTENTION}.{p}_proj" for p in "qkv"]


def tensors():
    return {name: gaussian(*shape, seed=seed) * (1 + seed) for seed, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def model(tmp_path):
    """Two shards that separate k_proj from its siblings, and side files."""
    every = tensors()
    first = {name: every[name] for name in list(every)[:3]}
    folder = write_checkpoint(tmp_path / "model", [first, {n: t for n, t in every.items() if n not in first}])
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "sub").mkdir()
    (folder / "sub" / "code.py").write_text("x = 1")
    return folder


def convert(model, scheme="channel", out="out", layout="ct", **options):
    recipe = Recipe.named(scheme, **{k: options.pop(k) for k in ("activation", "skip", "scale_format") if k in options})
    target = model.parent / out
    return convert_checkpoint(Checkpoint.open(model), target, recipe, layout=layout, **options), Checkpoint.open(target)


@pytest.mark.parametrize("scale_format", ["fp32", "po2"])
@pytest.mark.parametrize(("scheme", "layout"), [("channel", "ct"), ("block128", "ct"), ("block128", "native")])
def test_every_byte_is_the_oracle_s(model, scheme, layout, scale_format):
    """Slices of a few rows (or blocks) give what quantizing the whole matrix gives."""
    summary, result = convert(model, scheme, layout=layout, scale_format=scale_format, slice_values=20_000)
    stored = schema.parse_quantization_config(result.config)
    assert stored.layout == layout
    assert summary.quantized
    for module in summary.quantized:
        q = schema.read_scaled(result, module)
        want = quantize_ref(tensors()[f"{module}.weight"], E4M3, q.granularity, scale_format=scale_format)
        assert torch.equal(q.codes, want.codes), module
        assert torch.equal(q.scale, want.scale), module
        if scale_format == "po2":
            assert bool(is_power_of_two(q.scale).all())
    if layout == "ct":
        schema.validate_ct(result.config["quantization_config"])


def test_what_is_not_quantized_is_copied_bit_for_bit(model):
    summary, result = convert(model)
    assert sorted(summary.quantized) == sorted(LINEARS)
    for name, tensor in tensors().items():
        if name.removesuffix(".weight") not in LINEARS:
            assert torch.equal(result.get(name), tensor)
    extra = set(result.names()) - set(SHAPES)
    assert extra == {f"{module}.weight_scale" for module in LINEARS}
    assert result.dtype(f"{MLP}.up_proj.weight") == torch.float8_e4m3fn
    assert result.shape(f"{MLP}.up_proj.weight_scale") == (384, 1)
    assert result.config["quantization_config"]["ignore"] == ["lm_head"]
    assert {k: v for k, v in result.config.items() if k != "quantization_config"} == CONFIG


@pytest.mark.parametrize("layout", ["ct", "native"])
def test_fused_siblings_share_a_scale_per_tensor(model, layout):
    _, result = convert(model, "tensor", layout=layout)
    every = tensors()
    for group in (QKV, [f"{MLP}.gate_proj", f"{MLP}.up_proj"], [f"{ATTENTION}.o_proj"]):
        amax = max(float(every[f"{module}.weight"].abs().max()) for module in group)
        for module in group:
            q = schema.read_scaled(result, module)
            assert q.granularity == PerTensor()
            assert float(q.scale) == float(torch.tensor(amax) / 448)
            want = quantize_ref(every[f"{module}.weight"], E4M3, PerTensor(), scale=q.scale)
            assert torch.equal(q.codes, want.codes)
    assert result.shape(f"{QKV[0]}.weight_scale") == ((1,) if layout == "ct" else ())


def test_block_fallbacks_are_reported(model):
    """down_proj: K = 320. In ct it goes per channel into a group of its own, in native it stays."""
    summary, result = convert(model, "block128")
    fallen = {o.module: o for o in summary.outcomes if o.rule == "e4m3 row"}
    assert list(fallen) == [f"{MLP}.down_proj"]
    assert "K is not a multiple of 128" in fallen[f"{MLP}.down_proj"].reason
    assert schema.read_scaled(result, f"{MLP}.down_proj").granularity == PerRow()
    assert schema.read_scaled(result, f"{ATTENTION}.o_proj").granularity == PerBlock(128, 128)
    summary, result = convert(model, "block128", "out2", "native")
    assert torch.equal(result.get(f"{MLP}.down_proj.weight"), tensors()[f"{MLP}.down_proj.weight"])
    assert f"{MLP}.down_proj" in result.config["quantization_config"]["modules_to_not_convert"]


def test_skip_patterns(model):
    summary, result = convert(model, skip=("*.k_proj", r"re:.*down_proj$"))
    kept = [o for o in summary.outcomes if o.role == "linear" and not o.rule]
    assert sorted(o.module for o in kept) == sorted([*QKV, f"{MLP}.down_proj"])
    assert "fuse" in next(o.reason for o in kept if o.module.endswith("q_proj"))
    assert set(result.config["quantization_config"]["ignore"]) == {"lm_head", *QKV, f"{MLP}.down_proj"}


def test_side_files_travel(model):
    convert(model)
    out = model.parent / "out"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "sub/code.py"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    manifest = Manifest.load(out)
    assert manifest.source == fingerprint(model)
    assert set(manifest.files) == {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} - {MANIFEST}
    assert not [p for p in model.parent.iterdir() if p.name.startswith(".")]


def test_small_shards_and_their_index(model):
    summary, result = convert(model, max_shard_size=100_000)
    assert len(summary.files) > 3
    index = json.loads((model.parent / "out" / INDEX).read_text())
    assert set(index["weight_map"]) == set(result.names())
    for module in LINEARS:
        assert result.file_of(f"{module}.weight") == result.file_of(f"{module}.weight_scale")


def scales_for(model, modules, scale=0.01):
    one = {module: ModuleScales(input_amax=1.0, input_scale=scale * (i + 1)) for i, module in enumerate(modules)}
    return Scales(model_fingerprint=fingerprint(model), data_fingerprint="d", samples=1, tokens=1, modules=one)


@pytest.mark.parametrize(("scheme", "layout", "shape"), [("channel", "ct", (1,)), ("tensor", "native", ())])
def test_static_activations(model, scheme, layout, shape):
    """One input scale per linear; the largest of fused siblings, since engines take that one for all of them."""
    _, result = convert(model, scheme, layout=layout, activation="static", scales=scales_for(model, LINEARS))
    found = {module: result.get(f"{module}.input_scale") for module in LINEARS}
    assert all(tuple(value.shape) == shape for value in found.values())
    assert {float(found[m]) for m in QKV} == {float(torch.tensor(0.03))}
    assert float(found[f"{ATTENTION}.o_proj"]) == float(torch.tensor(0.04))


def test_static_activations_without_scales(model):
    with pytest.raises(MismatchError, match="no scales"):
        convert(model, activation="static")
    with pytest.raises(MismatchError, match="down_proj"):
        convert(model, activation="static", scales=scales_for(model, LINEARS[:-1]))


def test_edit_changes_weights_before_they_are_quantized(model):
    """What a merge does: FP32 results, quantized without a rounding in between."""
    changed = f"{ATTENTION}.q_proj.weight"
    delta = gaussian(256, 256, seed=77, dtype=torch.float32)

    def edit(name, tensor):
        return tensor.float() + delta if name == changed else tensor

    seen = {}

    def observe(module, start, before, q):
        seen.setdefault(module, []).append((start, before.clone(), dequantize_ref(q)))

    _, result = convert(model, edit=edit, observe=observe)
    want = quantize_ref(tensors()[changed].float() + delta, E4M3, PerRow())
    assert torch.equal(schema.read_scaled(result, QKV[0]).codes, want.codes)
    assert sorted(seen) == sorted(LINEARS)
    before = torch.cat([b for _, b, _ in sorted(seen[QKV[0]], key=lambda item: item[0])])
    assert torch.equal(before, tensors()[changed].float() + delta)


def test_edit_must_keep_the_shape(model):
    with pytest.raises(ConfigError, match="edit of a conversion"):
        convert(model, edit=lambda name, tensor: tensor.reshape(-1)[:5])
    assert not (model.parent / "out").exists()


def test_edit_that_makes_nan_is_refused(model):
    with pytest.raises(CheckpointError, match="need finite"):
        convert(model, edit=lambda name, tensor: tensor * float("nan"))


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block128"])
@pytest.mark.parametrize(
    ("name", "value"), [(f"{MLP}.up_proj.weight", "nan"), (f"{MLP}.up_proj.weight", "-inf"), ("lm_head.weight", "inf")]
)
def test_nan_and_inf_are_named(tmp_path, scheme, name, value):
    every = tensors()
    every[name][70, 3] = float(value)
    model = write_checkpoint(tmp_path / "model", [every])
    with pytest.raises(CheckpointError, match=rf"{name}; got {value} at \[70, 3\]"):
        convert(model, scheme)
    assert os.listdir(tmp_path) == ["model"]


def test_largest_finite_values_are_no_error(tmp_path):
    big = torch.full((64, 16), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    model = write_checkpoint(tmp_path / "model", [{f"{MLP}.up_proj.weight": big}])
    summary, _ = convert(model)
    assert summary.quantized


def test_zero_rows_and_blocks(tmp_path):
    weight = gaussian(256, 256)
    weight[:128] = 0
    model = write_checkpoint(tmp_path / "model", [{f"{MLP}.down_proj.weight": weight}])
    for scheme in ("channel", "block128"):
        _, result = convert(model, scheme, out=scheme)
        q = schema.read_scaled(result, f"{MLP}.down_proj")
        assert bool(torch.isfinite(q.scale).all() and (q.scale > 0).all())
        assert not dequantize_ref(q)[:128].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_float_inputs(tmp_path, dtype):
    weight = gaussian(8, 32, dtype=dtype)
    model = write_checkpoint(
        tmp_path / "model", [{f"{MLP}.down_proj.weight": weight, "norm.weight": weight[0].clone()}]
    )
    _, result = convert(model)
    assert torch.equal(schema.read_scaled(result, f"{MLP}.down_proj").codes, quantize_ref(weight, E4M3, PerRow()).codes)
    assert result.dtype("norm.weight") == dtype


def test_odd_tensors_are_copied(tmp_path):
    odd = {
        "scalar": torch.tensor(3.0),
        "ids": torch.arange(4),
        "mask": torch.tensor([True, False]),
        f"{MLP}.up_proj.weight": torch.zeros(0, 16),
        f"{MLP}.gate_proj.weight": torch.arange(8).reshape(2, 4),
    }
    model = write_checkpoint(tmp_path / "model", [odd])
    summary, result = convert(model)
    assert not summary.quantized
    for name, tensor in odd.items():
        assert torch.equal(result.get(name), tensor)


def test_fp8_input_is_refused_and_can_be_dequantized(model):
    _, first = convert(model, "block128")
    with pytest.raises(CheckpointError, match="quantized already"):
        convert(model.parent / "out", out="again")
    _, again = convert(model.parent / "out", out="again", dequantize=True)
    for module in LINEARS:
        want = quantize_ref(dequantize_ref(schema.read_scaled(first, module)), E4M3, PerRow())
        got = schema.read_scaled(again, module)
        assert torch.equal(got.codes, want.codes) and torch.equal(got.scale, want.scale), module
    assert not [name for name in again.names() if name.endswith("_inv")]


def test_dequantized_modules_that_are_skipped_become_bf16(model):
    _, first = convert(model, "tensor")
    _, again = convert(model.parent / "out", out="again", dequantize=True, skip=("*o_proj",))
    want = dequantize_ref(schema.read_scaled(first, f"{ATTENTION}.o_proj"), torch.bfloat16)
    assert torch.equal(again.get(f"{ATTENTION}.o_proj.weight"), want)


def test_fp8_codes_without_a_config_are_refused(tmp_path):
    codes = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    model = write_checkpoint(tmp_path / "model", [{"a.weight": codes}])
    with pytest.raises(CheckpointError, match="without a quantization_config"):
        convert(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "channel", "layout": "native"}, "one scale per channel"),
        ({"compat": "autofp8"}, "compat 'autofp8'"),
    ],
)
def test_bad_settings(model, options, message):
    with pytest.raises(ConfigError, match=message):
        convert(model, **options)
    assert not (model.parent / "out").exists()


def test_rules_that_slices_cannot_compute(model):
    source, out = Checkpoint.open(model), model.parent / "out"
    for recipe in (Recipe.named("channel", rounding="compensated"), Recipe.named("tensor", method="mse")):
        with pytest.raises(ConfigError):
            convert_checkpoint(source, out, recipe)


def test_gpt2_is_refused(tmp_path):
    model = write_checkpoint(tmp_path / "model", [{"h.0.attn.c_attn.weight": gaussian(8, 24)}], {"model_type": "gpt2"})
    with pytest.raises(ConfigError, match=r"\[in, out\]"):
        convert(model)


def test_output_folder_rules(model):
    source = Checkpoint.open(model)
    recipe = Recipe.named("channel")
    for out in (model, model / "inside", model.parent):
        with pytest.raises(InputError, match="apart"):
            convert_checkpoint(source, out, recipe)
    taken = model.parent / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        convert_checkpoint(source, taken, recipe)
    assert (taken / "file").read_text() == "mine"
    empty = model.parent / "empty"
    empty.mkdir()
    convert_checkpoint(source, empty, recipe)
    assert Checkpoint.open(empty)
    deep = model.parent / "new" / "deep"
    convert_checkpoint(source, deep, recipe)
    assert Checkpoint.open(deep)


def test_mse_scales_are_never_worse(model):
    source = Checkpoint.open(model)
    convert_checkpoint(source, model.parent / "mse", Recipe.named("channel", method="mse"))
    convert_checkpoint(source, model.parent / "absmax", Recipe.named("channel"))
    mse, absmax = Checkpoint.open(model.parent / "mse"), Checkpoint.open(model.parent / "absmax")
    for module in LINEARS:
        weight = source.get(f"{module}.weight").float()
        errors = [(dequantize_ref(schema.read_scaled(c, module)) - weight).square().sum(1) for c in (mse, absmax)]
        assert bool((errors[0] <= errors[1]).all()) and bool((errors[0] < errors[1]).any())


def test_llmcompressor_bytes(model):
    """Its recipe, restated independently: BF16 scale, BF16 division, clamp, cast; scales stored in BF16."""
    for scheme in ("channel", "block128"):
        summary, result = convert(model, scheme, out=scheme, compat="llmcompressor")
        for module in summary.quantized:
            weight = tensors()[f"{module}.weight"]
            scale = result.get(f"{module}.weight_scale")
            assert scale.dtype == torch.bfloat16
            n, k = weight.shape
            blocks = scheme == "block128" and scale.shape[1] > 1
            wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] if blocks else scale
            tiles = weight[:128, :128] if blocks else weight[:1]
            assert scale[0, 0] == (tiles.abs().max().float() / 448).to(torch.bfloat16)
            want = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(result.get(f"{module}.weight").view(torch.uint8), want.view(torch.uint8))


def test_llmcompressor_zero_row():
    q = slices.quantize_llmcompressor(torch.zeros(2, 4, dtype=torch.bfloat16), Recipe().rule, None)
    assert q.scale.tolist() == [[0.0078125]] * 2
    assert not q.codes.any()


def test_progress_adds_up_to_the_source(model):
    done = []
    convert(model, "block128", advance=done.append)
    assert sum(done) == Checkpoint.open(model).nbytes


def test_resume_takes_over_finished_shards(model, monkeypatch):
    """A run that dies after two shards (here: an interrupt) leaves work that an identical run goes on with."""
    from octavo.store import writer

    finish, count = writer.ShardWriter.finish_shard, []

    def dying(self, file):
        finish(self, file)
        count.append(file)
        if len(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer.ShardWriter, "finish_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        convert(model, max_shard_size=100_000)
    assert not (model.parent / "out").exists()
    work = model.parent / ".out.octavo-unfinished"
    assert work.is_dir() and not (work / "config.json").exists()
    monkeypatch.setattr(writer.ShardWriter, "finish_shard", finish)
    convert(model, out="other", max_shard_size=100_000)
    summary, result = convert(model, max_shard_size=100_000)
    assert len(summary.resumed) >= 2 and set(count) <= set(summary.resumed)
    assert fingerprint(result) == fingerprint(model.parent / "other")
    assert not work.exists()


@pytest.mark.parametrize("change", ["recipe", "model"])
def test_another_job_starts_cleanly(model, monkeypatch, change):
    from octavo.store import writer

    finish = writer.ShardWriter.finish_shard

    def dying(self, file):
        finish(self, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.ShardWriter, "finish_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        convert(model, max_shard_size=100_000)
    monkeypatch.setattr(writer.ShardWriter, "finish_shard", finish)
    if change == "model":
        shutil.rmtree(model)
        write_checkpoint(model, [{n: t + 1 for n, t in tensors().items()}])
    summary, _ = convert(model, "block128" if change == "recipe" else "channel", max_shard_size=100_000)
    assert summary.resumed == []
