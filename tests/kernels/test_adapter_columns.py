"""downs.cu, ups.cu and append.cu on the host: the bits of the same functions in plain torch."""

import pytest
import torch

from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.ops import adapter_columns, adapter_gradients, fused, groups
from octavo.testing import FLOOR_DB, assert_sqnr

pytestmark = pytest.mark.usefixtures("on_host")
NAN, INF = float("nan"), float("inf")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ranks", [(16,), (4, 12), (3, 8, 40)], ids=str)
def test_codes_of_a(both, ranks):
    adapters = [normal(rank, 144, seed=rank) * 2.0**rank for rank in ranks]
    adapters[0][0], adapters[-1][1] = 0, 2.0**-140
    adapters[0][2, :3] = torch.tensor([NAN, INF, -INF])
    found, want = both(lambda: adapter_columns.encode_downs(adapters, [0.5, 2.0, 3.0][: len(ranks)]))
    assert torch.equal(found.codes, want.codes) and torch.equal(found.unit, want.unit)
    assert found.codes.shape == (-(-3 * sum(ranks) // 128) * 128, 144) and found.rank == sum(ranks)


@pytest.mark.parametrize("power", [-20, 0, 20])
@pytest.mark.parametrize("ranks", [(16,), (3, 40)], ids=str)
def test_more_columns_of_w(both, ranks, power):
    """Rows that keep their scale, rows that must shrink, a row of zeros, NaN and Inf in B."""
    w = normal(37, 160) * torch.exp2(torch.arange(37.0) % 5)[:, None]
    w[3] = 0
    w = quantize_ref(w, E4M3, PerRow())
    w.scale[9] = 0  # as good as zeros
    w.codes[5, 7] = 0x7F  # NaN stays NaN where its row shrinks
    b = normal(37, ranks[-1], seed=1) * 2.0**power
    b[7, 0], b[8, 1] = NAN, INF
    downs = adapter_columns.encode_downs([normal(rank, 160, seed=rank) for rank in ranks], [2.0] * len(ranks))
    found, want = both(lambda: adapter_columns.extended(w, b, sum(ranks[:-1]), downs))
    assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale)
    assert found.codes[5, 7] == 0x7F
    assert bool((found.scale[0] > w.scale[0]).all()) is (power >= 0)


def test_columns_of_groups_and_blocks(both):
    """Scales per group of x and per block of W: columns with scales of their own, two groups of them here."""
    w = quantize_ref(normal(256, 384), E4M3, PerBlock(128, 128))
    b = normal(256, 40, seed=1) * torch.exp2(torch.arange(256.0) // 100)[:, None]
    b[3, 5], low = NAN, normal(12, 44, seed=5).bfloat16()
    low[1], low[6, 2] = 0, NAN
    downs = adapter_columns.encode_downs([normal(rank, 384, seed=rank) for rank in (4, 40)], [2.0, 0.5])

    def run():
        q, _ = groups.quantize_tokens(normal(12, 384).bfloat16(), spare=downs.room)
        q.codes[2] = 0
        forward, kept = adapter_columns.append_products(q, downs, torch.bfloat16)
        q, _ = groups.quantize_tokens(normal(12, 384).bfloat16(), spare=downs.room)
        sums = adapter_gradients.over_tokens(low, q).sum(0)
        assert sums.isnan().all(1).tolist() == [j == 2 for j in range(44)]
        wanted = low.double().mT @ dequantize_ref(q).double()
        assert_sqnr(sums.nan_to_num(), wanted.nan_to_num(), FLOOR_DB["rounding", "bfloat16"])
        return forward, adapter_columns.append_gradients(q, low, downs), adapter_columns.extended(w, b, 4, downs), kept

    found, want = both(run)
    assert torch.equal(found[3], want[3])
    for mine, theirs in zip(found[:3], want[:3], strict=True):
        assert torch.equal(mine.codes, theirs.codes)
        assert torch.equal(mine.scale.nan_to_num(7.0), theirs.scale.nan_to_num(7.0))
        assert mine.scale.shape[1] == 5 and mine.shape[1] == 640


@pytest.mark.parametrize("m, k, rank", [(5, 16, 4), (1100, 72, 16), (300, 336, 60)])
def test_over_tokens(both, m, k, rank):
    """Ends within a chunk of tokens, a block of columns and the ranks of a block; against float64."""
    low = normal(m, rank, seed=1).bfloat16()

    def run():
        q, _ = fused.quantize_tokens(normal(m, k).bfloat16(), spare=128)
        return adapter_gradients.over_tokens(low, q).sum(0), low.double().mT @ dequantize_ref(q).double()

    for found, want in both(run):
        assert found.shape == (rank, k) and found.dtype == torch.float32
        assert_sqnr(found, want, FLOOR_DB["rounding", "bfloat16"])


@pytest.mark.parametrize("m, n, rank", [(5, 16, 4), (150, 1096, 16), (100, 560, 17)])
def test_over_output(both, m, n, rank):
    """Ends within a block of columns, of tokens and within the ranks; against float64."""
    dy, b, low = normal(m, n).bfloat16(), normal(n, rank, seed=1), normal(m, rank + 3, seed=2).bfloat16()[:, 2:-1]

    def run():
        into = torch.full((m, rank + 5), 7.0).bfloat16()
        return adapter_gradients.over_output(dy, low, b, into[:, 1:-4]), into

    for db, into in both(run):
        assert db.dtype == torch.float32 and bool((into[:, 0] == 7).all() and (into[:, -4:] == 7).all())
        assert_sqnr(db, dy.double().mT @ low.double(), FLOOR_DB["rounding", "bfloat16"] - 1)
        assert_sqnr(into[:, 1:-4], dy.double() @ b.bfloat16().double(), FLOOR_DB["rounding", "bfloat16"] - 1)


def test_parts_of_a_sum(both):
    """Two sums in one launch, of other numbers of parts and rows."""
    parts, more = normal(3, 5, 12), normal(2, 7, 12, seed=1)

    def run():
        into = torch.full((7, 11), 7.0).bfloat16()
        alone = adapter_gradients.add_parts(parts, 9)
        return alone, adapter_gradients.add_parts(parts, 9, 0.5, (more, into[:, 1:10])), into

    for alone, half, into in both(run):
        assert torch.allclose(alone, parts.sum(0)[:, :9]) and torch.equal(half, alone / 2)
        assert torch.equal(into[:, 1:10], more.sum(0)[:, :9].bfloat16()) and bool((into[:, [0, 10]] == 7).all())


@pytest.mark.parametrize("power", [-20, 0, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", ["append_products", "append_gradients"])
def test_more_columns_of_tokens(both, function, dtype, power):
    x = normal(11, 160)
    x[2], x[4, 3] = 0, NAN
    downs = adapter_columns.encode_downs([normal(rank, 160, seed=rank) for rank in (3, 9)], [2.0, 1.0])
    downs.unit.mul_(2.0**power)
    low = (normal(11, 12, seed=5) * 64).to(dtype)
    low[5, 0], low[6, 1] = NAN, INF

    def run():
        q, _ = fused.quantize_tokens(x.bfloat16(), spare=downs.room)
        if function == "append_gradients":
            return adapter_columns.append_gradients(q, low, downs), low
        if power == 20:  # sums beyond what is a code
            q.codes.copy_(torch.where(q.codes & 0x7F == 0x7F, 0x7F, 0x7E))
            downs.codes.fill_(0x7E)
        return adapter_columns.append_products(q, downs, dtype)

    (found, kept), (want, wanted) = both(run)
    assert torch.equal(found.codes, want.codes) and torch.equal(kept.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(found.scale.nan_to_num(7.0), want.scale.nan_to_num(7.0))
    wrong = [4] if function == "append_products" else [5, 6]
    assert found.scale.isnan().flatten().nonzero().flatten().tolist() == wrong, "whole tokens"
