"""norm.cu, gated.cu and what quantize.cu does for them, on the host, against the same function in plain torch."""

import pytest
import torch

from octavo.formats.reference import dequantize_ref
from octavo.kernels.tiling import RowBlock
from octavo.ops import fused
from octavo.testing import FLOOR_DB, assert_sqnr

pytestmark = pytest.mark.usefixtures("on_host")
ACTIVATIONS = pytest.mark.parametrize("activation", fused.ACTIVATIONS)


def values(m, k, seed=0):
    """Tokens over twelve binary orders; one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-6, 6, (m, 1), generator=generator).float())
    x[1] = 0
    return x.bfloat16()


@pytest.mark.parametrize("k", [64, 200, 4096, 20480])
def test_norm_of_a_sum(both, k):
    """The bits of the sum that torch adds, and of its norm."""
    x, delta = (torch.randn(5, k, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    weight = torch.rand(k, generator=torch.Generator().manual_seed(2))

    def run():
        total = torch.full_like(x, 7.0)
        return *fused.quantize_tokens(x, columns=weight, epsilon=1e-6, spare=128, delta=delta, total=total), total

    for q, rstd, total in both(run):
        want, want_rstd = fused.quantize_tokens(x + delta, columns=weight, epsilon=1e-6)
        assert torch.equal(total, x + delta) and torch.equal(q.codes, want.codes)
        assert torch.allclose(q.scale, want.scale, rtol=1e-6) and torch.allclose(rstd, want_rstd, rtol=1e-6)


@pytest.mark.parametrize("k", [8, 576, 2056])
def test_norm_is_in_the_scale(both, k):
    """Codes bit for bit; rstd and with it the scale to the rounding of a sum in another order."""
    x, weight = values(5, k), torch.randn(k, generator=torch.Generator().manual_seed(2))
    (found, rstd), (want, want_rstd) = both(fused.quantize_tokens, x, columns=weight, epsilon=1e-6)
    assert torch.equal(found.codes, want.codes)
    torch.testing.assert_close(rstd, want_rstd, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.scale, want.scale, rtol=1e-6, atol=0)
    exact = torch.nn.functional.rms_norm(x.double(), (k,), weight.double(), 1e-6)
    assert_sqnr(dequantize_ref(found), exact, FLOOR_DB["linear", "e4m3", "normal"])


@pytest.mark.parametrize("widths", [(48, 16), (2048, 8, 16), (8, 8, 4096)], ids=str)
def test_parts_are_one_row(both, widths):
    parts = [values(4, width, seed) for seed, width in enumerate(widths)]
    columns = torch.rand(sum(widths), generator=torch.Generator().manual_seed(3))
    for spare in (0, 48):
        (found, _), (want, _) = both(fused.quantize_tokens, *parts, columns=columns, spare=spare)
        assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale)
        assert found.codes.stride(0) == want.codes.stride(0) == sum(widths) + spare


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("k", [64, 2056])
def test_norm_backward(both, k, with_residual):
    floor = FLOOR_DB["rounding", "bfloat16"] - (4 if with_residual else 1)  # rounded before it is added, and after
    x, dy, residual = values(5, k), values(5, k, 1), values(5, k, 2) if with_residual else None
    weight = torch.randn(k, generator=torch.Generator().manual_seed(3))
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
    found, want = both(fused.norm_backward, dy, x, weight, rstd, residual)
    assert_sqnr(found, want, floor)
    wide = x.double().requires_grad_()
    torch.nn.functional.rms_norm(wide, (k,), weight.double(), 1e-6).backward(dy.double())
    exact = wide.grad if residual is None else wide.grad + residual.double()
    rows = [0, 2, 3, 4]  # the gradient at a row of zeros is dY / sqrt(epsilon): it would be all that is compared
    assert_sqnr(found[rows], exact[rows], floor)  # 64 values a row: the mean is rough


@pytest.mark.parametrize("k", [64, 2056])
def test_norm_backward_from_the_codes(both, k):
    """What the products read is enough: the error of the codes enters one small term; zeros in the weight too."""
    x, dy = values(5, k), values(5, k, 1)
    weight = torch.rand(k, generator=torch.Generator().manual_seed(3)) + 0.25
    weight[7] = 0
    q, rstd = fused.quantize_tokens(x, columns=weight, epsilon=1e-6, spare=16)
    found, want = both(fused.norm_backward, dy, q, weight, rstd)
    assert_sqnr(found, want, FLOOR_DB["rounding", "bfloat16"] - 1)
    rows = [0, 2, 3, 4]
    wide = x.double().requires_grad_()
    torch.nn.functional.rms_norm(wide, (k,), weight.double(), 1e-6).backward(dy.double())
    assert_sqnr(found[rows], wide.grad[rows], 25.0 if k == 64 else 40.0)


def test_weights_whose_codes_suffice():
    weight = torch.rand(1024, generator=torch.Generator().manual_seed(0)) + 0.1
    assert fused.codes_suffice(weight) and fused.codes_suffice(-weight.bfloat16())
    weight[:64] = 1e-4
    assert fused.codes_suffice(weight)
    weight[64] = 0
    assert not fused.codes_suffice(weight)


@ACTIVATIONS
@pytest.mark.parametrize("k", [8, 576, 4104, 16392])
def test_gated(both, k, activation):
    found, want = both(fused.gated, values(4, k), values(4, k, 1), activation, spare=16)
    assert [q.codes.stride(0) for q in found] == [k + 16, k, k]
    for ours, theirs in zip(found[1:], want[1:], strict=True):
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scale, theirs.scale)
    torch.testing.assert_close(found[0].scale, want[0].scale, rtol=1e-5, atol=0)
    # exp differs in the last bits, which moves a code now and then by one
    assert (found[0].codes.int() - want[0].codes.int()).abs().max() <= 1
    assert (found[0].codes != want[0].codes).float().mean() < 1e-3


@pytest.mark.parametrize("block", [RowBlock(96, 1, 3), RowBlock(64, 2, 2), RowBlock(96, 1)], ids=str)
def test_gated_rows_on_their_way(both, block, monkeypatch):
    """A block takes several rows, with those after them already in its shared memory; an Inf among them."""
    gate, up, dh = (values(7, 576, seed) for seed in range(3))
    gate[2, 5] = up[3, 70] = dh[4, 9] = torch.inf
    found, want = both(fused.gated, gate, up, "silu")
    for ours, theirs in zip(found[1:], want[1:], strict=True):
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scale, theirs.scale)
    assert (found[0].codes.int() - want[0].codes.int()).abs().max() <= 1
    columns = torch.rand(1152, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(fused, "gated_block", lambda *_: block)
    (dgate, dup, q), (wanted, *_) = both(fused.gated_backward, dh, *want[1:], columns, "silu")
    finite = wanted.isfinite()
    assert_sqnr(dgate[finite], wanted[finite], 60.0)
    again = fused.quantize_tokens(dgate, dup, columns=columns)[0]
    assert torch.equal(q.codes, again.codes) and torch.equal(q.scale, again.scale)


@ACTIVATIONS
@pytest.mark.parametrize("k", [8, 576, 4104])
def test_gated_backward(both, k, activation):
    _, gate, up = fused.gated(values(5, k), values(5, k, 1), activation)
    dh, columns = values(5, k, 2), torch.rand(2 * k, generator=torch.Generator().manual_seed(3))
    found, want = both(fused.gated_backward, dh, gate, up, columns, activation, spare=16)
    assert found[2].codes.stride(0) == want[2].codes.stride(0) == 2 * k + 16
    for ours, theirs in zip(found[:2], want[:2], strict=True):
        assert_sqnr(ours, theirs, 60.0)  # float32 inside: equal but for values on the edge of a rounding
    again = fused.quantize_tokens(found[0], found[1], columns=columns)[0]
    assert torch.equal(found[2].codes, again.codes) and torch.equal(found[2].scale, again.scale)
    place = dh.clone()
    reused = both(fused.gated_backward, place, gate, up, columns, activation, reuse=True)[0]
    assert reused[0] is place and all(torch.equal(a, b) for a, b in zip(reused[:2], found[:2], strict=True))
    assert (
        fused.gated_backward(torch.zeros_like(dh), gate, up, columns, activation)[2].codes.bitwise_and(127).any() == 0
    )


@pytest.mark.parametrize("ranks", [(4,), (16, 8, 16), (20, 4)], ids=str)
def test_low_rank_from_the_codes(both, ranks):
    q = fused.quantize_tokens(values(9, 144))[0]
    generator = torch.Generator().manual_seed(0)
    adapters = [torch.randn(rank, 144, generator=generator) for rank in ranks]
    found, want = both(fused.low_rank, q, adapters, torch.bfloat16)
    for mine, theirs, a in zip(found, want, adapters, strict=True):
        assert mine.shape == theirs.shape == (9, len(a))
        assert_sqnr(mine, dequantize_ref(q).double() @ a.bfloat16().double().mT, FLOOR_DB["dequant", "bfloat16"])


def test_nothing_to_do(both):
    empty = values(4, 64)[:0]
    for found in both(fused.gated, empty, empty, "silu"):
        assert [q.codes.shape for q in found] == [(0, 64)] * 3
    for q, _ in both(fused.quantize_tokens, empty, empty):
        assert q.codes.shape == (0, 128)
