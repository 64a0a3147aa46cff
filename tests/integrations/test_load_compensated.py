"""octavo.load with compensated rounding: the codes of `octavo quantize`, and ragged blocks that no file can hold."""

import pytest
import torch

import octavo
from octavo.base.errors import ConfigError, MismatchError
from octavo.formats.reference import dequantize_ref
from octavo.integrations.moments import moments_of
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.store.schema import read_scaled
from octavo.store.tensors import Checkpoint
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint

SAMPLES = {"samples": 8, "context": 64}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 40)
    return str(path)


@pytest.fixture
def moments(tiny_llama, text, tmp_path):
    return moments_of(tiny_llama, text, tmp_path / "m", weighting="fisher", **SAMPLES)


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, FrozenFloat8Linear)}


@pytest.mark.parametrize(("scheme", "scale_format"), [("channel", "fp32"), ("channel", "po2"), ("tensor", "fp32")])
def test_same_codes_as_quantize_on_disk(tiny_llama, moments, tmp_path, scheme, scale_format):
    out = tmp_path / "out"
    settings = {"scheme": scheme, "scale_format": scale_format, "rounding": "compensated"}
    quantize_checkpoint(QuantizeConfig(model=str(tiny_llama), out=out, moments=moments.folder, **settings))
    recipe = octavo.Recipe.named(scheme, scale_format=scale_format)
    model = octavo.load(tiny_llama, recipe, device="cpu", rounding="compensated", moments=moments)
    stored = Checkpoint.open(out)
    assert len(linears(model)) == 14
    for name, module in linears(model).items():
        expected = read_scaled(stored, name)
        assert torch.equal(module.scaled().codes, expected.codes), name
        assert torch.equal(module.scaled().scale.reshape(-1), expected.scale.reshape(-1)), name


@pytest.mark.parametrize("scale_format", ["fp32", "po2"])
def test_ragged_blocks_lower_the_output_error(tiny_llama, moments, scale_format):
    recipe = octavo.Recipe.named("block128", scale_format=scale_format)
    better = linears(octavo.load(tiny_llama, recipe, device="cpu", rounding="compensated", moments=moments.folder))
    plain = linears(octavo.load(tiny_llama, recipe, device="cpu"))
    source = Checkpoint.open(tiny_llama)
    total = dict.fromkeys(("better", "plain"), 0.0)
    for name in plain:
        w, h = source.get(f"{name}.weight").float(), moments.get(name)
        ratio = better[name].scaled().scale / plain[name].scaled().scale
        assert bool(((ratio >= 0.5) & (ratio < 2)).all())
        for kind, module in (("better", better[name]), ("plain", plain[name])):
            e = w - dequantize_ref(module.scaled())
            total[kind] += float(((e @ h) * e).sum())
    assert total["better"] < 0.6 * total["plain"]


def test_data_is_calibrated_on_and_gives_the_same_codes_each_time(tiny_llama, moments, text):
    given = octavo.load(tiny_llama, device="cpu", rounding="compensated", moments=moments)
    gathered = octavo.load(tiny_llama, device="cpu", rounding="compensated", data=text, **SAMPLES)
    for name, module in linears(given).items():
        assert torch.equal(module.weight, linears(gathered)[name].weight), name


def test_saves_what_quantize_writes(tiny_llama, moments, tmp_path):
    model = octavo.load(tiny_llama, device="cpu", rounding="compensated", moments=moments)
    model.save_pretrained(tmp_path / "saved")
    again = octavo.load(tmp_path / "saved", device="cpu")
    for name, module in linears(model).items():
        assert torch.equal(module.weight, linears(again)[name].weight), name


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rounding": "compensated"}, "neither"),
        ({"rounding": "compensated", "data": "x", "moments": "y"}, "both"),
        ({"data": "x"}, "no use"),
        ({"rounding": "upwards"}, "upwards"),
    ],
)
def test_settings_that_do_not_go_together(tiny_llama, options, word):
    with pytest.raises(ConfigError, match=word):
        octavo.load(tiny_llama, device="cpu", **options)


def test_from_pretrained_needs_moments():
    with pytest.raises(ConfigError, match="no moments"):
        octavo.OctavoConfig(octavo.Recipe.named("channel", rounding="compensated"))


def test_moments_of_another_model(tiny_llama_128, moments):
    with pytest.raises(MismatchError, match="another model"):
        octavo.load(tiny_llama_128, device="cpu", rounding="compensated", moments=moments.folder)


def test_codes_on_disk_are_not_rounded_again(tiny_llama, moments, tmp_path):
    quantize_checkpoint(QuantizeConfig(model=str(tiny_llama), out=tmp_path / "out"))
    with pytest.raises(ConfigError, match="rounding 'compensated'"):
        octavo.load(tmp_path / "out", "channel", device="cpu", rounding="compensated", moments=moments)
