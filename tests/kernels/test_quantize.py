"""quantize.cu on the host: the codes and scales of formats.reference, bit for bit."""

import pytest
import torch

from octavo.formats.granularity import PerGroup, PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3
from octavo.kernels.tiling import RowBlock
from octavo.ops import native

pytestmark = pytest.mark.usefixtures("on_host")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
GROUPED = pytest.mark.parametrize("grouped", [False, True], ids=["token", "group128"])


def run(x, grouped, columns=None, scale_by_columns=False):
    q = native._quantize(x, Rule(E4M3, granularity(grouped)), columns, scale_by_columns)
    return q.codes, q.scale


def awkward(m, k, dtype):
    """Magnitudes over the dtype's range, zero rows and groups, -0, Inf and NaN."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-14, 14, (m, 1), generator=generator).float())
    x[0] = 0
    x[1, : min(k, 128)] = -0.0
    x[2, 3], x[2, 5], x[3, 7] = torch.inf, -torch.inf, torch.nan
    return x.to(dtype)


def granularity(grouped):
    return PerGroup(128) if grouped else PerRow()


@DTYPES
@GROUPED
@pytest.mark.parametrize("k", [8, 576, 3000])
def test_bits_of_the_reference(k, grouped, dtype):
    x = awkward(5, k, dtype)
    codes, scale = run(x, grouped)
    want = quantize_ref(x, E4M3, granularity(grouped))
    assert torch.equal(scale, want.scale) and torch.equal(codes, want.codes)


@GROUPED
def test_every_bfloat16(grouped):
    """Beside 448, so that the scale is 1: every value's own code."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.abs() < 448]
    every = torch.cat([every, every.new_zeros(-len(every) % 120)]).view(-1, 120)
    every = torch.cat([every, torch.full((len(every), 8), 448.0, dtype=every.dtype)], dim=1)
    codes, scale = run(every, grouped)
    want = quantize_ref(every, E4M3, granularity(grouped))
    assert torch.equal(scale, want.scale) and torch.equal(codes, want.codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_quotient(dtype):
    """Significands of the largest value times those of all, over E4M3's range: a quotient on the edge of a code is
    frequent, and is on its own side. Of float16's 1024 x 1024, those of 128 largest values."""
    bits = 8 if dtype == torch.bfloat16 else 11
    every = torch.arange(2 ** (bits - 1), 2**bits) / 2 ** (bits - 1)
    values = torch.cat([every * 2.0**-e for e in range(20 if bits == 8 else 8)])
    largest = (
        every if bits == 8 else every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[:128]]
    )
    rows = torch.where(values <= largest[:, None], values, -values / 2)
    rows[:, -1] = largest
    rows = rows[:, -8192:].to(dtype)
    codes, scale = run(rows, False)
    want = quantize_ref(rows, E4M3, PerRow())
    assert torch.equal(scale, want.scale) and torch.equal(codes, want.codes)


def test_the_largest_bfloat16():
    """A scale whose reciprocal has no exact rest."""
    x = torch.tensor([[3e38, -2.7e38, 1e36, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan]]).bfloat16()
    codes, scale = run(x, False)
    want = quantize_ref(x, E4M3, PerRow())
    assert torch.equal(scale, want.scale) and torch.equal(codes, want.codes)


@GROUPED
def test_tiny_and_huge(grouped):
    """Times 2**-24 and 2**24 the same codes; below the smallest normal scale all stays finite."""
    x = awkward(4, 256, torch.bfloat16)[:2] + awkward(6, 256, torch.bfloat16)[4:]
    codes = [run((x.float() * 2.0**power).bfloat16(), grouped)[0] for power in (0, -24, 24)]
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])
    smallest = torch.full((1, 128), 1e-38).bfloat16()
    want = quantize_ref(smallest, E4M3, granularity(grouped))
    assert torch.equal(run(smallest, grouped)[0], want.codes)


@DTYPES
@GROUPED
def test_columns_are_folded_in_float32(grouped, dtype):
    x, columns = awkward(5, 576, dtype), torch.rand(576) * 1e-3
    codes, scale = run(x, grouped, columns)
    want = quantize_ref(x.float() * columns, E4M3, granularity(grouped))
    assert torch.equal(scale, want.scale) and torch.equal(codes, want.codes)


@pytest.mark.parametrize("stages", [2, 3])
def test_rows_on_their_way(stages, monkeypatch):
    """Each block takes several rows, with those after them already in its shared memory."""
    monkeypatch.setattr(native, "row_block", lambda *_: RowBlock(96, 1, stages, 1))
    x, columns = awkward(9, 576, torch.bfloat16), torch.rand(576) * 1e-3
    codes, scale = run(x, False, columns)
    want = quantize_ref(x.float() * columns, E4M3, PerRow())
    assert torch.equal(scale, want.scale) and torch.equal(codes, want.codes)


def test_strides():
    """A view of wider rows, and scales column by column as cuBLAS reads them."""
    wide = awkward(6, 640, torch.bfloat16)
    codes, scale = run(wide[:, :576], True, scale_by_columns=True)
    want = quantize_ref(wide[:, :576], E4M3, PerGroup(128))
    assert scale.stride() == (1, 6) and torch.equal(scale, want.scale) and torch.equal(codes, want.codes)


def test_quotients_are_divisions():
    """Scales and values of every kind of mantissa: the quotient without a division is the correctly rounded one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 2048, generator=generator) * torch.exp2(torch.linspace(-40, 40, 64))[:, None]
    x[:, 1::2] = x[:, :1] * torch.arange(1, 1025) / 64  # ties and their neighbours
    columns = torch.rand(2048, generator=generator)
    x = x.bfloat16()
    codes, scale = run(x, False, columns)
    want = quantize_ref(x.float() * columns, E4M3, PerRow())
    assert torch.equal(scale, want.scale) and torch.equal(codes, want.codes)
