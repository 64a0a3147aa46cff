"""Backend `native`: its kernels on the host, its products by torch's scaled_mm on the CPU."""

import pytest
import torch

from octavo.base.errors import ShapeError
from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3
from octavo.ops import library, native, reference, w8a16
from octavo.testing import FLOOR_DB, assert_sqnr, sqnr_db

pytestmark = pytest.mark.usefixtures("on_host")
WEIGHTS = pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=str)


def problem(m, n, k, granularity):
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-9, 9, (m, 1), generator=generator).float())
    w = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)
    return x.bfloat16(), quantize_ref(w, E4M3, granularity)


@WEIGHTS
@pytest.mark.parametrize("activation", ["token", "static"])
def test_linear_is_the_references(granularity, activation):
    x, w = problem(5, 48, 144, granularity)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = x.float().abs().amax() / 448 if activation == "static" else None
    found = native.linear(x, w, bias, activation, scale)
    want = reference.linear(x.double(), w, bias, activation, scale)
    assert_sqnr(found, want, FLOOR_DB["rounding", "bfloat16"] - 5)  # the product and the sum are rounded to BF16


@WEIGHTS
def test_gradient(granularity):
    """dX from FP8 operands: what quantizing dY * s costs, no more; and a gradient of zeros is zeros."""
    grad, w = problem(6, 144, 144, granularity)[0], problem(6, 144, 48, granularity)[1]
    want = grad.double() @ dequantize_ref(w).double()
    found = native.linear_dx(grad, w)
    assert_sqnr(found, want, FLOOR_DB["linear", "e4m3", "normal"])
    assert not native.linear_dx(torch.zeros_like(grad), w).any()


@pytest.mark.parametrize("power", [-24, 24])
def test_gradient_scales_with_the_loss(power):
    """2**24 times the loss: 2**24 times the gradient, bit for bit."""
    grad, w = problem(6, 144, 144, PerRow())[0], problem(6, 144, 48, PerRow())[1]
    scaled = native.linear_dx((grad.float() * 2.0**power).bfloat16(), w)
    assert torch.equal(scaled.float(), native.linear_dx(grad, w).float() * 2.0**power)


def test_folding_beats_ignoring_the_scales():
    """Rows of W over three decades: quantizing dY first and W's rows as they are would not be the same W."""
    grad, w = problem(6, 144, 144, PerRow())[0], problem(6, 144, 48, PerRow())[1]
    want = grad.double() @ dequantize_ref(w).double()
    unfolded = quantize_ref(grad, E4M3, PerRow())
    ignored = dequantize_ref(unfolded).double() @ (dequantize_ref(w) / w.scale).double()
    assert sqnr_db(native.linear_dx(grad, w), want) > sqnr_db(ignored, want) + 20


def test_what_the_kernels_do_not_do_is_the_references():
    x = problem(3, 16, 64, PerRow())[0]
    for rule, scale in [(Rule(E4M3, PerRow(), "mse"), None), (Rule(E4M3, PerRow(), scale_format="po2"), None)]:
        found, want = native.quantize(x, scale, rule), reference.quantize(x, scale, rule)
        assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale)
    given = torch.full((3, 1), 0.5)
    assert torch.equal(native.quantize(x, given, Rule(E4M3, PerRow())).scale, given)
    empty = native.quantize(x[:0], None, Rule(E4M3, PerRow()))
    assert empty.codes.shape == (0, 64) and empty.scale.shape == (0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(144,), (3, 5, 264), (70, 8), (2, 9000)], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerGroup(128)], ids=str)
def test_given_scales_and_one_for_all(granularity, shape, dtype):
    """Bits of the reference: ties, Inf, NaN, signed zeros, and scales whose reciprocal is no float32."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    x.flatten()[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
    x, rule = x.to(dtype), Rule(E4M3, granularity)
    for given in (0.013, 2.0**-5, 1e-40, 2.0**127, 0.0):
        scale = torch.full(granularity.scale_shape(shape), given)
        if scale.numel() > 1:
            scale.flatten()[1::2] *= 1.5
        found, want = native.quantize(x, scale, rule), reference.quantize(x, scale, rule)
        assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, scale), given
    if granularity == PerTensor():
        for values in (x, torch.zeros_like(x)):
            found, want = native.quantize(values, None, rule), reference.quantize(values, None, rule)
            assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale)


def test_scales_that_do_not_go_together():
    x, w = problem(3, 128, 128, PerBlock(128, 128))
    with pytest.raises(ShapeError, match="inputs per row; need group128"):
        native.scaled_mm(quantize_ref(x, E4M3, PerRow()), w, torch.bfloat16)


@pytest.mark.parametrize("granularity", [PerRow(), PerGroup(128)], ids=str)
@pytest.mark.parametrize("shape", [(144,), (3, 5, 144), (2, 3, 5, 16)], ids=str)
def test_any_number_of_dimensions(shape, granularity):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, want = native.quantize(x, None, Rule(E4M3, granularity)), quantize_ref(x, E4M3, granularity)
    assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128)], ids=str)
def test_stacked_matrices_decode_each_by_its_own_scales(granularity, dtype):
    experts = (
        torch.randn(3, 140, 144, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 8, 64])[:, None, None]
    )
    q = quantize_ref(experts, E4M3, granularity)
    assert torch.equal(w8a16.dequantize(q, dtype), dequantize_ref(q, dtype))


def test_every_operation_asks_for_its_own_backend(monkeypatch):
    """A backend that quantizes need not be able to dequantize: fake_quantize takes two."""
    homes = {"quantize": native, "dequantize": reference}
    monkeypatch.setattr(library, "kernels", lambda problem, device, backend: homes[problem.op])
    x = torch.randn(5, 144, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = torch.ops.octavo.fake_quantize(x, None, "e4m3", 1, 0, "absmax", "fp32", "auto")
    assert torch.equal(found, dequantize_ref(quantize_ref(x, E4M3, PerRow()), torch.bfloat16))
