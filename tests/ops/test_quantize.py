"""octavo.quantize and dequantize: what they promise, and what they say no to."""

import pytest
import torch

import octavo
from octavo.base.errors import ConfigError, ShapeError
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.reference import quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3, E5M2, E8M0
from octavo.ops.quantize import fake_quantize
from octavo.testing import FLOOR_DB, assert_sqnr

FAMILIES = {
    "normal": lambda g: torch.randn(512, 576, generator=g),
    "uniform": lambda g: torch.rand(512, 576, generator=g) * 2 - 1,
    "outliers": lambda g: torch.randn(512, 576, generator=g) * torch.where(torch.arange(576) % 64 == 5, 50.0, 1.0),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128)], ids=str)
def test_cast_error_is_at_its_floor(granularity, spec, family):
    x = FAMILIES[family](torch.Generator().manual_seed(1))
    for scale_format in ("fp32", "po2"):
        q = octavo.quantize(x, Rule(spec, granularity, scale_format=scale_format))
        found = assert_sqnr(octavo.dequantize(q), x, FLOOR_DB["cast", spec.name, family])
        if family != "outliers":  # there, a scale per row puts the outliers, which carry the power, near a code
            assert found < FLOOR_DB["cast", spec.name, family] + 1, "the floor is too loose to catch a bug"


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
def test_floor_catches_a_truncating_cast_and_a_lost_mantissa_bit(spec):
    x = FAMILIES["normal"](torch.Generator().manual_seed(1))
    q = quantize_ref(x, spec, PerRow())
    wide = octavo.dequantize(q)
    too_far = (wide.abs() > x.abs()).to(torch.uint8)
    truncated = octavo.ScaledTensor(q.codes - too_far, q.scale, spec, PerRow())
    lost_bit = octavo.ScaledTensor(q.codes & 0xFE, q.scale, spec, PerRow())
    for broken in (truncated, lost_bit):
        with pytest.raises(AssertionError, match="dB, floor"):
            assert_sqnr(octavo.dequantize(broken), x, FLOOR_DB["cast", spec.name, "normal"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_float_dtype(dtype):
    x = torch.randn(40, 70).to(dtype)
    q, want = octavo.quantize(x), quantize_ref(x, E4M3, PerRow())
    assert torch.equal(q.codes, want.codes) and torch.equal(q.scale, want.scale)
    assert octavo.dequantize(q, dtype).dtype == dtype


def test_a_given_scale_is_used_and_not_aliased():
    x, scale = torch.randn(8, 16), torch.full((8, 1), 0.25)
    q = octavo.quantize(x, scale=scale)
    assert torch.equal(q.codes, quantize_ref(x, E4M3, PerRow(), scale=scale).codes)
    scale.zero_()
    assert float(q.scale.min()) == 0.25


def test_quantize_is_a_constant_to_autograd():
    x = torch.randn(4, 8, requires_grad=True)
    q = octavo.quantize(x)
    assert not q.scale.requires_grad and not octavo.dequantize(q).requires_grad


def test_fake_quantize_passes_the_gradient_straight_through():
    x = (torch.randn(6, 50) * 1000).requires_grad_()
    y = fake_quantize(x, Rule(granularity=PerTensor()), scale=torch.tensor(0.5))
    assert torch.equal(y, octavo.dequantize(octavo.quantize(x, Rule(granularity=PerTensor()), scale=torch.tensor(0.5))))
    assert float(y.detach().abs().max()) == 224.0, "this case is to saturate"
    grad = torch.randn(6, 50)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: octavo.quantize(torch.ones(4, 4, dtype=torch.int32)), ShapeError, "float values"),
        (lambda: octavo.quantize(torch.ones(4, 4).to(torch.float8_e4m3fn)), ShapeError, "float values"),
        (lambda: octavo.quantize(torch.tensor(1.0)), ShapeError, "one dimension"),
        (lambda: octavo.quantize(torch.ones(4, 4), Rule(E8M0)), ConfigError, "holds scales"),
        (lambda: octavo.quantize(torch.ones(4, 4), Rule(rounding="compensated")), ConfigError, "Calibrate"),
        (lambda: octavo.quantize(torch.ones(4, 4), scale=torch.ones(4)), ShapeError, r"\[4, 1\]"),
        (lambda: octavo.quantize(torch.ones(4, 4), scale=torch.ones(4, 1).half()), ShapeError, "float32"),
        (lambda: octavo.dequantize(octavo.quantize(torch.ones(4, 4)), torch.int8), ConfigError, "float16"),
        (lambda: octavo.quantize(torch.ones(4, 4), backend="cqu"), ConfigError, "Did you mean 'cpu'"),
    ],
    ids=["int", "float8", "scalar", "e8m0", "compensated", "scale shape", "scale dtype", "to int8", "backend"],
)
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()
