"""w8a16.cu against the dequantized product, on the host, thread by thread."""

import pytest
import torch

from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3, E5M2
from octavo.kernels.plans import Block, Panels, Ring, TermBlock, Terms
from octavo.ops import w8a16
from octavo.testing import assert_sqnr

pytestmark = pytest.mark.usefixtures("on_host")
# One rounding of the result: 55.6 dB in BF16, 73.7 in FP16 (docs/numerics.md), less 3 for the scatter of few outputs.
FLOOR_DB = {torch.bfloat16: 52.6, torch.float16: 70.7}
GRANULARITIES = pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128)], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def run(x, q, bias=None):
    return w8a16.linear(x, q, bias, "none", None)


def problem(m, n, k, granularity, dtype, spec=E4M3):
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator).to(dtype)
    return x, quantize_ref(torch.randn(n, k, generator=generator) * 0.05, spec, granularity)


def product(x, q, bias=None):
    y = x.double() @ dequantize_ref(q).double().mT
    return y + bias.double() if bias is not None else y


@DTYPES
@GRANULARITIES
@pytest.mark.parametrize("m, n, k", [(1, 33, 144), (8, 16, 1040), (9, 130, 272), (16, 200, 16)])
def test_product(granularity, dtype, m, n, k):
    """Ragged rows, ragged K, more chunks than warps and fewer, both tiles."""
    x, q = problem(m, n, k, granularity, dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    assert_sqnr(run(x, q, bias), product(x, q, bias), FLOOR_DB[dtype])


@pytest.mark.parametrize(
    "plan",
    [
        Ring(1, 2, 1, 4, 2),
        Ring(2, 2, 2, 3, 4),
        Ring(1, 2, 2, 8, 3, staged=0),
        Block(1, 4, 2, 2),
        Block(2, 8, 4, 3, splits=3),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "granularity, dtype", [(PerRow(), torch.bfloat16), (PerBlock(128, 128), torch.float16)], ids=["row", "block"]
)
def test_other_plans(plan, granularity, dtype):
    x, q = problem(11, 150, 528, granularity, dtype)
    bias = torch.randn(150, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_sqnr(w8a16.product(x, q, bias, plan), product(x, q, bias), FLOOR_DB[dtype])


@DTYPES
@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
def test_every_finite_code_is_exact(spec, dtype):
    """Row i holds code i once, times 1: the result is the code's value, subnormals and the sign of zero included."""
    codes = torch.zeros(256, 16, dtype=torch.uint8)
    codes[:, 5] = torch.arange(256, dtype=torch.uint8)
    q = ScaledTensor(codes, torch.ones(()), spec, PerTensor())
    values = torch.arange(256, dtype=torch.uint8).view(spec.dtype).float()
    finite = torch.isfinite(values)
    y = run(torch.ones(1, 16, dtype=dtype), q)[0]
    assert torch.equal(y[finite].float(), values[finite])


@pytest.mark.parametrize("power, dtype", [(-120, torch.bfloat16), (7, torch.bfloat16), (-10, torch.float16)], ids=str)
def test_scales_stay_float32(power, dtype):
    """Neither a small scale nor the power of two that decoding leaves over may vanish or overflow on the way."""
    x, q = problem(2, 16, 128, PerRow(), dtype)
    q = ScaledTensor(q.codes, torch.full_like(q.scale, 2.0**power), q.spec, q.granularity)
    assert_sqnr(run(x, q) * 2.0**-power, product(x, q) * 2.0**-power, FLOOR_DB[dtype])


def test_inf_and_nan_stay_in_their_token():
    x, q = problem(3, 40, 144, PerRow(), torch.bfloat16)
    clean = run(x, q)
    x[1, 7] = torch.inf
    x[2, 143] = torch.nan
    y = run(x, q)
    assert torch.equal(y[0], clean[0]) and not torch.isfinite(y[1:]).any()


def test_rows_past_the_end_of_x_are_not_read_as_numbers():
    """x is a view whose rows go on with NaN."""
    wide = torch.full((2, 64), torch.nan, dtype=torch.bfloat16)
    x, q = problem(2, 16, 48, PerRow(), torch.bfloat16)
    wide[:, :48] = x
    assert torch.equal(run(wide[:, :48], q), run(x, q))


def test_same_bits_alone_and_in_a_batch():
    """What a token gets does not depend on how many others there are, as long as the tile is the same."""
    x, q = problem(8, 48, 1040, PerRow(), torch.bfloat16)
    together = run(x, q)
    for token in range(8):
        assert torch.equal(run(x[token : token + 1], q)[0], together[token])


def test_views(monkeypatch):
    """Inputs and codes that begin anywhere, transposed inputs: the same bits as their contiguous copies."""
    x, q = problem(4, 32, 48, PerRow(), torch.bfloat16)
    want = run(x, q)
    flat = torch.zeros(4 * 48 + 3, dtype=torch.bfloat16)
    flat[3:] = x.flatten()
    codes = torch.zeros(q.codes.numel() + 5, dtype=torch.uint8)
    codes[5:] = q.codes.flatten()
    moved = ScaledTensor(codes[5:].view(32, 48), q.scale, q.spec, q.granularity)
    assert torch.equal(run(flat[3:].view(4, 48), moved), want)
    assert torch.equal(run(x.mT.contiguous().mT, q), want)


@GRANULARITIES
@pytest.mark.parametrize("m, n, k", [(17, 40, 144), (3, 40, 200)])
def test_decoded_for_one_product(granularity, m, n, k):
    """More tokens, or K that 16 does not divide; and the gradient. Weights are rounded once, results once."""
    x, q = problem(m, n, k, granularity, torch.bfloat16)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16()
    assert_sqnr(w8a16.product(x, q, bias, Panels(1 << 31)), product(x, q, bias), FLOOR_DB[torch.bfloat16] - 5)
    grad = problem(m, n, n, granularity, torch.bfloat16)[0]
    want = grad.double() @ dequantize_ref(q).double()
    assert_sqnr(w8a16.linear_dx(grad, q), want, FLOOR_DB[torch.bfloat16] - 5)


@pytest.mark.parametrize("m", [5, 6])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow()], ids=str)
def test_two_terms(granularity, m):
    """x = high + low is exact, so what is lost is the rounding of the halves and of their sum."""
    x, q = problem(m, 48, 144, granularity, torch.bfloat16)
    x *= torch.exp2(torch.arange(float(m)))[:, None].bfloat16() * 2.0**-100
    bias = torch.randn(48, generator=torch.Generator().manual_seed(0)).bfloat16() * 2.0**-98
    assert_sqnr(w8a16.product(x, q, bias, Terms()).double() * 2.0**100, product(x, q, bias) * 2.0**100, 49.6)
    x[2, 5] = torch.inf
    y = w8a16.product(x, q, bias, Terms())
    assert not torch.isfinite(y[2]).any() and torch.isfinite(y[[0, 1, 3, 4]]).all()


@pytest.mark.parametrize(
    "granularity, plan",
    [
        (PerRow(), TermBlock()),
        (PerRow(), TermBlock(224, 128, 3)),
        (PerTensor(), TermBlock(128, 128, 4, 2, splits=3)),
        (PerBlock(128, 128), TermBlock(128, short=1, splits=2)),
    ],
    ids=str,
)
def test_two_terms_in_one_kernel(granularity, plan):
    """One rounding. Tokens, rows and K that fill no block; more steps than the ring holds."""
    x, q = problem(67, 260, 912, granularity, torch.bfloat16)
    x *= torch.exp2(torch.arange(67.0) % 7)[:, None].bfloat16()
    x[2, 5] = torch.inf
    bias = torch.randn(260, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, finite = w8a16.product(x, q, bias, plan), torch.arange(67) != 2
    assert_sqnr(y[finite], product(x, q, bias)[finite], FLOOR_DB[torch.bfloat16])
    assert not torch.isfinite(y[2]).any()


@pytest.mark.parametrize("size", [256, 128])
@GRANULARITIES
def test_panels(granularity, size):
    """The bits of one decoded weight; the last panel is a rest."""
    x, q = problem(5, 400, 400, granularity, torch.bfloat16)
    bias = torch.randn(400, generator=torch.Generator().manual_seed(0)).bfloat16()
    for given in (bias, None):
        whole = w8a16.product(x, q, given, Panels(1 << 31))
        assert_sqnr(w8a16.product(x, q, given, Panels(size)), whole.double(), 60)
    assert_sqnr(w8a16.product_dx(x, q, Panels(size)), w8a16.product_dx(x, q, Panels(1 << 31)).double(), 60)
