"""The oracle against an independent one: every BF16 value, every FP32 edge, and the special values."""

import itertools

import numpy as np
import pytest
import torch

from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.reference import decode, decode_table, dequantize_ref, encode, quantize_ref, scaled_mm_ref
from octavo.formats.spec import E4M3, E5M2, E8M0
from tests.formats.rounding_rules import grid, nearest_code, nearest_codes

SPECS = pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
GRANULARITIES = pytest.mark.parametrize(
    "granularity", [PerTensor(), PerRow(), PerGroup(128), PerGroup(7), PerBlock(128, 128), PerBlock(3, 5)], ids=str
)


def bits(*patterns):
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def all_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@SPECS
def test_encode_every_bf16(spec):
    x = all_bf16()
    codes = encode(x, spec)
    finite = torch.isfinite(x)
    sign = (x.view(torch.int16) < 0).to(torch.uint8) << 7
    want = torch.from_numpy(nearest_codes(x[finite].float().numpy(), spec.name)) | sign[finite]
    assert torch.equal(codes[finite], want)
    top = len(grid(spec.name)) - 1
    assert torch.equal(codes[torch.isinf(x)], torch.tensor([top, top | 0x80], dtype=torch.uint8))
    nan = torch.isnan(x)
    assert set(codes[nan].tolist()) <= set(spec.nan_codes)
    assert torch.equal(codes[nan] & 0x80, sign[nan]), "NaN keeps its sign"


@SPECS
def test_encode_fp32_edges(spec):
    """Each code, each midpoint between codes, and the float32 neighbours of both, with both signs."""
    values = [float(v) for v in grid(spec.name)]
    points = values + [(a + b) / 2 for a, b in itertools.pairwise(values)] + [464.0, 61440.0, 3.4e38, 1e-45]
    points = np.array(points, dtype=np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    for sign in (1, -1):
        x = torch.from_numpy(near * np.float32(sign))
        want = [nearest_code(float(v), spec.name) | (0x80 if np.signbit(v) else 0) for v in x.numpy()]
        assert encode(x, spec).tolist() == want


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.0, 0x00), (-0.0, 0x80), (448.0, 0x7E), (464.0, 0x7E), (465.0, 0x7E), (float("inf"), 0x7E),
     (-float("inf"), 0xFE), (2.0**-9, 0x01), (2.0**-10, 0x00), (3 * 2.0**-10, 0x02), (-(2.0**-10), 0x80)],
)  # fmt: skip
def test_encode_named_values(value, code):
    assert encode(torch.tensor([value]), E4M3).item() == code


@SPECS
def test_encode_random_fp32_bit_patterns(spec):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    raw[:100_000] = (raw[:100_000] & 0x80FFFFFF) | ((rng.integers(110, 145, 100_000, dtype=np.uint32)) << 23)
    x = raw.view(np.float32)
    x = x[np.isfinite(x)]
    want = nearest_codes(x, spec.name) | (np.signbit(x).astype(np.uint8) << 7)
    assert np.array_equal(encode(torch.from_numpy(x), spec).numpy(), want)


@pytest.mark.parametrize("spec", [E4M3, E5M2, E8M0], ids=str)
def test_decode_is_torchs(spec):
    codes = torch.arange(256, dtype=torch.uint8)
    ours, torchs = decode(codes, spec), codes.view(spec.dtype).float()
    assert torch.equal(ours.view(torch.int32)[~ours.isnan()], torchs.view(torch.int32)[~torchs.isnan()])
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert [i for i, v in enumerate(decode_table(spec)) if v.isnan()] == list(spec.nan_codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_e4m3_decodes_exactly_in_16_bit(dtype):
    table = decode_table(E4M3)
    keep = ~table.isnan()
    assert torch.equal(table.to(dtype).float()[keep], table[keep])


@SPECS
def test_encode_inverts_decode(spec):
    codes = torch.arange(256, dtype=torch.uint8)
    finite = torch.isfinite(decode(codes, spec))
    assert torch.equal(encode(decode(codes, spec), spec)[finite], codes[finite])


@GRANULARITIES
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (3, 5), (2, 130, 7), (0, 8), (8, 0)], ids=str)
def test_quantize_matches_a_plain_loop(granularity, shape):
    """Every tile by hand: amax, division, rounding."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    q = quantize_ref(x, E4M3, granularity)
    assert q.scale.shape == granularity.scale_shape(shape)
    if x.numel() == 0:
        return
    back = dequantize_ref(q)
    rows, cols = granularity.tile
    n, k = shape[-2:]
    matrices = x.reshape(-1, n, k) if (rows, cols) != (0, 0) else x.reshape(1, 1, -1)
    outputs = back.reshape(matrices.shape)
    for matrix, output in zip(matrices, outputs, strict=True):
        height, width = rows or matrix.shape[0], cols or matrix.shape[1]
        for i in range(0, matrix.shape[0], height):
            for j in range(0, matrix.shape[1], width):
                tile = matrix[i : i + height, j : j + width]
                scale = tile.abs().max() / 448
                want = encode(tile / scale, E4M3)
                assert torch.equal(output[i : i + height, j : j + width], decode(want, E4M3) * scale)


@GRANULARITIES
def test_special_tiles(granularity):
    """Zero, Inf, NaN and denormal inputs: finite scales, exact zeros, saturation, NaN stays where it was."""
    zero = quantize_ref(torch.zeros(9, 9), E4M3, granularity)
    assert torch.isfinite(zero.scale).all() and (zero.scale > 0).all()
    assert torch.equal(dequantize_ref(zero), torch.zeros(9, 9))

    x = torch.ones(9, 9)
    x[0, 0], x[4, 4], x[8, 8] = torch.inf, torch.nan, -torch.inf
    q = quantize_ref(x, E4M3, granularity)
    assert torch.isfinite(q.scale).all()
    back = dequantize_ref(q)
    assert torch.equal(back.isnan(), x.isnan())
    assert back[0, 0] == back[0, 0].abs() > 0 and back[8, 8] < 0
    ones = torch.isfinite(x)
    assert torch.equal(back[ones], x[ones])

    denormal = torch.full((9, 9), 1e-42)
    tiny = quantize_ref(denormal, E4M3, granularity)
    assert torch.isfinite(dequantize_ref(tiny)).all() and (tiny.scale >= 2.0**-126).all()


@pytest.mark.parametrize("power", [-24, -60, 24])
def test_codes_do_not_depend_on_magnitude(power):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)) * 0.02
    for granularity in (PerTensor(), PerRow(), PerBlock(32, 32)):
        a, b = quantize_ref(x, E4M3, granularity), quantize_ref(x * 2.0**power, E4M3, granularity)
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scale * 2.0**power, b.scale)


def test_given_scale_is_used():
    x = torch.randn(4, 8)
    q = quantize_ref(x, E4M3, PerTensor(), scale=torch.tensor(0.5))
    assert q.scale == 0.5 and torch.equal(q.codes, encode(x / 0.5, E4M3))


def test_scaled_mm_is_the_product_of_the_dequantized():
    a = quantize_ref(torch.randn(5, 64), E4M3, PerRow())
    b = quantize_ref(torch.randn(7, 64), E4M3, PerBlock(4, 16))
    want = dequantize_ref(a).double() @ dequantize_ref(b).double().T
    torch.testing.assert_close(scaled_mm_ref(a, b).double(), want, rtol=1e-5, atol=1e-5)
    assert scaled_mm_ref(a, b, torch.bfloat16).dtype == torch.bfloat16
