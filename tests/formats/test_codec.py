"""The codec against an independent one: every BF16 value, every FP32 edge, and the special values."""

import itertools

import numpy as np
import pytest
import torch

from octavo.formats.codec import decode, decode_table, encode
from octavo.formats.spec import E4M3, E5M2, E8M0
from tests.formats.rounding_rules import grid, nearest_code, nearest_codes

SPECS = pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)


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
