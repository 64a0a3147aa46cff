"""Backend `cpu`: the same bits as the reference, at the speed of memory. Products in float32, rounded once.

Encoding uses torch's float8 cast behind a clamp, after a check, once per process, that this build's cast rounds as
the reference does. Decoding looks two codes at a time up in a table of 65,536 pairs of float32, which is faster than
torch's own float8 -> float32.
"""

from __future__ import annotations

from functools import cache

import torch

from octavo.base.log import logger
from octavo.formats.granularity import Granularity, PerRow, PerTensor
from octavo.formats.recipe import Rule
from octavo.formats.reference import decode_table, encode
from octavo.formats.scale import mse_scale, scale_of
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import SPECS, FloatSpec
from octavo.ops import reference

# Elements per slice: its float32 temporaries (1 MiB each) stay in the cache, and peak memory stays flat.
SLICE = 1 << 18


def quantize(x: torch.Tensor, scale: torch.Tensor | None, rule: Rule) -> ScaledTensor:
    x = x.contiguous()
    if scale is None:
        if rule.method == "mse":
            scale = mse_scale(x, rule.spec, rule.granularity, rule.scale_format)
        else:
            scale = scale_of(amax(x, rule.granularity), rule.spec, rule.scale_format)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    for start, stop, wide in _slices(x, scale, rule.granularity):
        values = x.reshape(-1, x.shape[-1])[start:stop].float() / wide
        encode_into(values, codes.reshape(-1, x.shape[-1])[start:stop], rule.spec)
    return ScaledTensor(codes, scale, rule.spec, rule.granularity)


def dequantize(q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    values = decode(q.codes, q.spec)
    return values.mul_(q.granularity.expand(q.scale, tuple(q.shape))).to(dtype)


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    if activation != "none":
        x32 = dequantize(quantize(x, input_scale, reference.activation_rule(activation)), torch.float32)
    else:
        x32 = x.float()
    if isinstance(w.granularity, (PerTensor, PerRow)):
        # A scale per output column: on the product it costs M x N, on the weight N x K.
        y = (x32 @ decode(w.codes, w.spec).mT).mul_(_column(w))
    else:
        y = x32 @ dequantize(w, torch.float32).mT
    if bias is not None:
        y.add_(bias.float())
    return y.to(x.dtype)


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    if isinstance(w.granularity, (PerTensor, PerRow)):
        dx = (grad.float() * _column(w)) @ decode(w.codes, w.spec)
    else:
        dx = grad.float() @ dequantize(w, torch.float32)
    return dx.to(grad.dtype)


def scaled_mm(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    return (dequantize(a, torch.float32) @ dequantize(b, torch.float32).mT).to(dtype)


def amax(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """`granularity.amax(x)`, without the passes over x that only Inf and NaN need."""
    found = granularity.reduce(x.abs()).float()
    return found if bool(torch.isfinite(found).all()) else granularity.amax(x)


def encode_into(values: torch.Tensor, out: torch.Tensor, spec: FloatSpec) -> None:
    """formats.reference.encode of float32 `values`, which are overwritten, into uint8 `out`."""
    if cast_is_exact(spec.name):
        out.view(spec.dtype).copy_(values.clamp_(-spec.max, spec.max))
    else:
        out.copy_(encode(values, spec))


def decode(codes: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
    """formats.reference.decode: float32, exact."""
    flat = codes.contiguous().view(-1)
    if flat.numel() % 2 or flat.storage_offset() % 2:
        return _table(spec.name).index_select(0, flat.int()).view(codes.shape)
    pairs = flat.view(torch.uint16).int()
    return _pair_table(spec.name).index_select(0, pairs).view(torch.float32).view(codes.shape)


@cache
def cast_is_exact(name: str) -> bool:
    """Whether clamp + torch's float8 cast equals the reference: every BF16 value, and the float32 around every tie."""
    spec = SPECS[name]
    every = torch.arange(65536, dtype=torch.int32) << 16
    table = decode_table(spec)
    table = table[torch.isfinite(table)].sort().values
    ties = ((table[1:] + table[:-1]) / 2).view(torch.int32)
    values = torch.cat([every, ties - 1, ties, ties + 1]).view(torch.float32)
    cast = values.clamp(-spec.max, spec.max).to(spec.dtype).view(torch.uint8)
    exact = torch.equal(cast, encode(values, spec))
    if not exact:
        logger().warning("this torch's cast to %s does not round to nearest even: using slower arithmetic", name)
    return exact


def _column(w: ScaledTensor) -> torch.Tensor:
    """A per-tensor or per-row scale as [1, 1 or N], to multiply columns of the output."""
    return w.scale.reshape(1, -1)


def _slices(x: torch.Tensor, scale: torch.Tensor, granularity: Granularity):  # type: ignore[no-untyped-def]
    wide = granularity.expand(scale, tuple(x.shape))
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    wide = wide.reshape(-1, wide.shape[-1]) if wide.dim() else wide.reshape(1, 1)
    step = max(1, SLICE // max(x.shape[-1], 1))
    for start in range(0, rows, step):
        yield start, start + step, wide[start : start + step] if wide.shape[0] > 1 else wide


@cache
def _table(name: str) -> torch.Tensor:
    return decode_table(SPECS[name])


@cache
def _pair_table(name: str) -> torch.Tensor:
    """int64 [65536]: entry a + 256 * b holds the float32 of byte a and of byte b (little-endian memory order)."""
    table = _table(name)
    pairs = torch.stack([table.repeat(256), table.repeat_interleave(256)], dim=1)
    return pairs.view(torch.int64).view(-1)
