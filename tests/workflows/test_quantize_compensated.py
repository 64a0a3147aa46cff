"""octavo quantize --rounding compensated, end to end on a tiny model."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import octavo
from octavo.base.errors import ConfigError, MismatchError
from octavo.integrations.moments import moments_of
from octavo.ops.rounding import Compensator
from octavo.store.moments import Moments
from octavo.store.schema import read_scaled
from octavo.store.tensors import Checkpoint
from octavo.workflows.calibrate import CalibrateConfig, calibrate
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint

LEAVES = ("gate", "up", "down")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 40)
    return path


@pytest.fixture(scope="module")
def stacked_moe(tiny_moe, tmp_path_factory):
    """The same model with its experts in one tensor per layer and leaf, as Transformers holds them."""
    folder = tmp_path_factory.mktemp("stacked")
    shutil.copytree(tiny_moe, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for at in [f"model.layers.{layer}.mlp.experts" for layer in range(2)]:
        parts = {p: torch.stack([tensors.pop(f"{at}.{e}.{p}_proj.weight") for e in range(8)]) for p in LEAVES}
        tensors[f"{at}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{at}.down_proj"] = parts["down"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def config(model, out, **options):
    return QuantizeConfig(model=str(model), out=out, rounding="compensated", samples=8, context=64, **options)


@pytest.mark.parametrize("scheme", ["channel", "block128", "tensor"])
def test_lower_output_error(tiny_llama_128, data, tmp_path, scheme):
    plain = quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=tmp_path / "plain", scheme=scheme))
    report = quantize_checkpoint(config(tiny_llama_128, tmp_path / "better", scheme=scheme, data=str(data)))
    assert report.output_error < 0.6 and plain.output_error is None
    assert not report.fallbacks and report.quantized == plain.quantized
    a, b = Checkpoint.open(tmp_path / "plain"), Checkpoint.open(tmp_path / "better")
    assert a.shapes() == b.shapes()
    name = "model.layers.1.mlp.down_proj"
    q, p = read_scaled(b, name), read_scaled(a, name)
    assert not torch.equal(q.codes, p.codes)
    ratio = q.scale / p.scale  # searched within an octave above; one scale per tensor is not
    assert bool((ratio == 1).all()) if scheme == "tensor" else bool(((ratio >= 1) & (ratio < 2)).all())
    assert not list(tmp_path.glob(".octavo-moments*")), "the moments were temporary"


def test_the_same_codes_each_time(tiny_llama, data, tmp_path):
    """From moments of calibrate, which weighs every sample, and from data, of which every fourth one is weighed."""
    settings = {"samples": 8, "context": 64, "channels": False}
    out, few = tmp_path / "m", tmp_path / "few"
    calibrate(CalibrateConfig(model=str(tiny_llama), data=str(data), out=tmp_path / "s.json", moments=out, **settings))
    assert Moments.open(out, model=tiny_llama).index.weighting == "fisher"
    moments_of(tiny_llama, str(data), few, samples=8, context=64, weighting="fisher")
    for name in ("a", "b"):
        quantize_checkpoint(config(tiny_llama, tmp_path / name, moments=out))
    quantize_checkpoint(config(tiny_llama, tmp_path / "c", data=str(data)))
    quantize_checkpoint(config(tiny_llama, tmp_path / "d", moments=few))
    a, b, c, d = (Checkpoint.open(tmp_path / name) for name in "abcd")
    for name in a.names():
        assert torch.equal(a.get(name).view(torch.uint8), b.get(name).view(torch.uint8)), name
        assert torch.equal(c.get(name).view(torch.uint8), d.get(name).view(torch.uint8)), name


@pytest.mark.parametrize("scheme", ["channel", "block128"])
def test_layers_side_by_side_get_the_codes_they_get_alone(tiny_llama_128, data, tmp_path, scheme, monkeypatch):
    """Siblings and layers of one shape in one call, against every matrix in a call of its own."""
    moments = tmp_path / "m"
    moments_of(tiny_llama_128, str(data), moments, samples=8, context=64, weighting="none")
    calls = []
    original = Compensator.together
    monkeypatch.setattr(Compensator, "together", lambda self, jobs: calls.append(len(jobs)) or original(self, jobs))
    quantize_checkpoint(config(tiny_llama_128, tmp_path / "together", moments=moments, scheme=scheme))
    assert max(calls) == 6, "q, k and v of both layers"
    calls.clear()
    monkeypatch.setattr("octavo.store.slices.TOGETHER", 0)
    quantize_checkpoint(config(tiny_llama_128, tmp_path / "alone", moments=moments, scheme=scheme))
    assert max(calls) == 1
    together, alone = Checkpoint.open(tmp_path / "together"), Checkpoint.open(tmp_path / "alone")
    for name in together.names():
        a, b = (checkpoint.get(name).view(torch.uint8) for checkpoint in (together, alone))
        assert (a != b).float().mean() <= 0.01, f"{name}: but for the order of float32 sums"


@pytest.mark.parametrize("stacked", [False, True], ids=["one tensor per expert", "stacked on disk"])
def test_experts_are_rounded_by_their_own_tokens(tiny_moe, stacked_moe, data, tmp_path, stacked):
    """Those with many tokens with compensation, those with few to nearest, with the reason; loading does the same."""
    source = stacked_moe if stacked else tiny_moe
    moments = moments_of(source, str(data), tmp_path / "m", samples=1, context=64, weighting="fisher")
    few = moments.index.few
    assert few and all(".experts." in name for name in few), "the text reaches some experts only"
    report = quantize_checkpoint(config(source, tmp_path / "out", moments=tmp_path / "m"))
    fallbacks = {m.module: m.reason for m in report.fallbacks}
    compensated = {m.module for m in report.modules if "compensated" in m.rule and ".experts." in m.module}
    assert compensated and set(fallbacks) == {name for name in few if "gate_up" not in name}
    assert all("calibration tokens reached it" in reason and "nearest" in reason for reason in fallbacks.values())
    out, loaded = (
        Checkpoint.open(tmp_path / "out"),
        octavo.load(source, "channel", device="cpu", rounding="compensated", moments=moments),
    )
    for layer in range(2):
        experts = loaded.get_submodule(f"model.layers.{layer}.mlp.experts")
        for expert in range(8):
            for leaf, q in experts.scaled(expert).items():
                stored = read_scaled(out, f"model.layers.{layer}.mlp.experts.{expert}.{leaf}")
                assert torch.equal(q.codes, stored.codes), (layer, expert, leaf)


@pytest.mark.parametrize(
    ("options", "word"),
    [({}, "neither"), ({"data": "x", "moments": "y"}, "both"), ({"data": "x", "rounding": "nearest"}, "no use")],
)
def test_settings_that_do_not_go_together(tiny_llama, tmp_path, options, word):
    values = {"model": str(tiny_llama), "out": tmp_path / "out", "rounding": "compensated", **options}
    with pytest.raises(ConfigError, match=word):
        quantize_checkpoint(QuantizeConfig(**values))
    assert not (tmp_path / "out").exists()


def test_moments_of_another_model(tiny_llama, tiny_llama_128, data, tmp_path):
    settings = {"samples": 2, "context": 64, "channels": False, "moments": tmp_path / "m"}
    calibrate(CalibrateConfig(model=str(tiny_llama), data=str(data), out=tmp_path / "s.json", **settings))
    with pytest.raises(MismatchError, match="another model"):
        quantize_checkpoint(config(tiny_llama_128, tmp_path / "out", moments=tmp_path / "m"))
