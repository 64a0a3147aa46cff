"""The CPU backend gives the reference's bits: every BF16 value, the edges of FP32, every granularity and shape."""

import pytest
import torch

from octavo.formats.codec import decode_table, encode
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3, E5M2
from octavo.ops import cpu
from tests.ops.cases import GRANULARITIES, MATRICES, awkward, same

SPECS = [E4M3, E5M2]


def every_bfloat16():
    return (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)


def edges(spec):
    """Every value of the format, every tie between two, one float32 below and above each, and the ends of float32."""
    table = decode_table(spec)
    table = table[torch.isfinite(table)].sort().values
    bits = torch.cat([table, (table[1:] + table[:-1]) / 2]).view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    info = torch.finfo(torch.float32)
    ends = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal / 2, 464.0, 465.0, 61440.0, 1e-45])
    return torch.cat([near, ends, -ends])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("values", [every_bfloat16, None], ids=["every bfloat16", "float32 edges"])
def test_encode_equals_the_reference(spec, values):
    x = values() if values else edges(spec)
    out = torch.empty(x.shape, dtype=torch.uint8)
    cpu.encode_into(x.clone(), out, spec)
    assert torch.equal(out, encode(x, spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_this_build_passes_the_check_of_the_cast(spec):
    assert cpu.cast_is_exact(spec.name)


def test_a_build_whose_cast_differs_is_noticed_and_still_exact(monkeypatch, caplog):
    real = torch.Tensor.to

    def truncating(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        if args and args[0] == torch.float8_e4m3fn:
            bits = out.view(torch.uint8)
            bits[(bits & 0x7F) == 0x7E] -= 1
        return out

    cpu.cast_is_exact.cache_clear()
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "octavo"):
        patch.setattr(torch.Tensor, "to", truncating)
        assert not cpu.cast_is_exact("e4m3")
    assert "does not round to nearest even" in caplog.text
    x = edges(E4M3)
    out = torch.empty(x.shape, dtype=torch.uint8)
    cpu.encode_into(x.clone(), out, E4M3)
    assert torch.equal(out, encode(x, E4M3))
    cpu.cast_is_exact.cache_clear()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("count", [256, 255, 1], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 3.0**-9, 2.0**121, 1e-41], ids=str)
def test_decode_of_every_code_equals_the_reference(spec, count, scale):
    q = ScaledTensor(torch.arange(256, dtype=torch.uint8)[:count], torch.tensor(scale), spec, PerTensor())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert same(cpu.dequantize(q, dtype), dequantize_ref(q, dtype))
    without_nan = torch.tensor([c for c in range(count) if c not in spec.nan_codes], dtype=torch.uint8)
    q = ScaledTensor(without_nan, torch.tensor(scale), spec, PerTensor())
    assert same(cpu.dequantize(q, torch.float32), dequantize_ref(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*MATRICES, (5,), (2, 3, 50, 70), (0, 2, 8)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_quantize_equals_the_reference(granularity, shape, dtype):
    x = awkward(shape, dtype)
    check(x, Rule(E4M3, granularity))
    check(x, Rule(E5M2, granularity, scale_format="po2"))


def test_quantize_equals_the_reference_over_many_slices(monkeypatch):
    monkeypatch.setattr(cpu, "SLICE", 1000)
    monkeypatch.setattr(cpu, "PANEL", 1000)
    monkeypatch.setattr(cpu, "PANEL_ROWS", 7)
    for granularity in GRANULARITIES:
        x = awkward((300, 130))
        check(x, Rule(granularity=granularity))
        check(x.t(), Rule(granularity=granularity))
        q = cpu.quantize(torch.randn(300, 130), None, Rule(granularity=granularity))
        a, grad = torch.randn(5, 130), torch.randn(5, 300)
        torch.testing.assert_close(cpu.linear(a, q, None, "none", None), a @ dequantize_ref(q).T, rtol=0, atol=1e-4)
        torch.testing.assert_close(cpu.linear_dx(grad, q), grad @ dequantize_ref(q), rtol=0, atol=1e-4)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(48, 80)], ids=str)
def test_searched_and_given_scales(granularity):
    x = torch.randn(100, 170)
    check(x, Rule(granularity=granularity, method="mse"))
    scale = torch.rand(granularity.scale_shape((100, 170))) + 0.01
    check(x, Rule(granularity=granularity), scale)


def check(x, rule, scale=None):
    found = cpu.quantize(x, scale, rule)
    want = quantize_ref(x, rule.spec, rule.granularity, method=rule.method, scale_format=rule.scale_format, scale=scale)
    assert torch.equal(found.codes, want.codes), rule
    assert torch.equal(found.scale, want.scale), rule
    for dtype in (torch.float32, torch.bfloat16):
        assert same(cpu.dequantize(found, dtype), dequantize_ref(want, dtype)), rule
