"""Backend `cpu`: the same bits as the reference, at the speed of memory. Products in float32, rounded once.

Everything goes through slices that stay in the cache, and a large weight is decoded panel by panel: a float32 copy of
it is never whole. Encoding uses torch's float8 cast behind a clamp, after a check, once per process, that this build's
cast rounds as the reference does. Decoding goes through float16, whose bits an E4M3 or E5M2 code becomes by a shift:
an order of magnitude faster than torch's float8 -> float32. benchmarks/cpu_ops.py has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch

from octavo.base.log import logger
from octavo.formats.codec import decode, decode_table, encode
from octavo.formats.granularity import Granularity, PerTensor
from octavo.formats.rule import Rule
from octavo.formats.scale import mse_scale, scale_of
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import SPECS, FloatSpec
from octavo.ops import reference

SLICE = 1 << 18  # elements per thread: 1 MiB of float32
PANEL = 1 << 20  # elements of a weight decoded at once: small panels and the matrix product fight for the cache
PANEL_ROWS = 256  # below this many rows of the weight a product spends its time packing x
_INTS = {2: torch.int16, 4: torch.int32}


def quantize(x: torch.Tensor, scale: torch.Tensor | None, rule: Rule) -> ScaledTensor:
    granularity, shape = rule.granularity, tuple(x.shape)
    x = x.contiguous()
    if scale is None and rule.method == "mse":
        scale = mse_scale(x, rule.spec, granularity, rule.scale_format)
    elif scale is None and (isinstance(granularity, PerTensor) or not x.numel()):
        scale = scale_of(amax(x, granularity), rule.spec, rule.scale_format)
    found = scale is None
    out_scale = torch.empty(granularity.scale_shape(shape)) if scale is None else scale.contiguous()
    codes = torch.empty(shape, dtype=torch.uint8)
    for values, grid, out in _slices(granularity, x, out_scale, codes):
        if found:
            grid.copy_(scale_of(_amax(values, granularity), rule.spec, rule.scale_format))
        buffer = torch.empty(values.shape).copy_(values)
        _by_tile(torch.Tensor.div_, buffer, grid, granularity)
        encode_into(buffer, out, rule.spec)
    return ScaledTensor(codes, out_scale, rule.spec, granularity)


def dequantize(q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=dtype)
    dequantize_into(q.codes.contiguous(), q.scale.contiguous(), q.spec, q.granularity, out)
    return out


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    if activation != "none":
        x32 = dequantize(quantize(x, input_scale, reference.activation_rule(activation)), torch.float32)
    else:
        x32 = x.float()
    y = torch.empty(x.shape[0], w.shape[0])
    for start, stop, panel in _panels(w):
        torch.mm(x32, panel.mT, out=y[:, start:stop])
    if bias is not None:
        y.add_(bias.float())
    return y.to(x.dtype)


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    g, shape = grad.float(), (grad.shape[0], w.shape[1])
    dx = torch.empty(shape) if len(w.codes) else torch.zeros(shape)
    for start, stop, panel in _panels(w):
        dx.addmm_(g[:, start:stop], panel, beta=1 if start else 0)
    return dx.to(grad.dtype)


def scaled_mm(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    return (dequantize(a, torch.float32) @ dequantize(b, torch.float32).mT).to(dtype)


def amax(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """`granularity.amax(x)`, one slice at a time."""
    if not x.numel():
        return granularity.amax(x)
    x = x.contiguous()
    if isinstance(granularity, PerTensor):
        return torch.stack([_amax(part, PerTensor()) for part in torch.split(x.view(-1), _slice_size())]).amax()
    out = torch.empty(granularity.scale_shape(tuple(x.shape)))
    for values, grid, _ in _slices(granularity, x, out, x):
        grid.copy_(_amax(values, granularity))
    return out


def encode_into(values: torch.Tensor, out: torch.Tensor, spec: FloatSpec) -> None:
    """formats.codec.encode of float32 `values`, which are overwritten, into uint8 `out`."""
    if cast_is_exact(spec.name):
        out.view(spec.dtype).copy_(values.clamp_(-spec.max, spec.max))
    else:
        out.copy_(encode(values, spec))


def dequantize_into(
    codes: torch.Tensor, scale: torch.Tensor, spec: FloatSpec, granularity: Granularity, out: torch.Tensor
) -> None:
    """formats.reference.dequantize_ref of contiguous codes and scale into contiguous `out`: the same bits.

    An E4M3 code seeeemmm, sign-extended to 16 bits and shifted by 7, is s s eeee mmm 0000000: with the second s
    cleared a float16 whose exponent bias is 15 instead of 7, so 2**-8 of the value, subnormals included. The factor
    goes into the scale, exactly. Lost is the all-ones NaN alone. An E5M2 code is the upper byte of a float16.
    """
    is_e4m3 = spec.name == "e4m3"
    lift = scale * 256.0 if is_e4m3 else scale
    by_table = is_e4m3 and codes.numel() > 0 and (_has_nan(codes) or bool(torch.isinf(lift).any()))
    half = torch.empty(0, dtype=torch.int16)
    for part, grid, target in _slices(granularity, codes, scale if by_table else lift, out):
        values = target if out.dtype == torch.float32 else torch.empty(part.shape)
        if by_table:
            values.copy_(decode(part, spec))
        else:
            half = half if half.shape == part.shape else torch.empty(part.shape, dtype=torch.int16)
            bits = half.copy_(part.view(torch.int8)).mul_(1 << (7 if is_e4m3 else 8))
            values.copy_((bits.bitwise_and_(~0x4000) if is_e4m3 else bits).view(torch.float16))
        _by_tile(torch.Tensor.mul_, values, grid, granularity)
        if values is not target:
            target.copy_(values)


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


def _has_nan(codes: torch.Tensor) -> bool:
    """Whether E4M3 codes hold 0x7F or 0xFF: each the largest byte there is, as int8 and as uint8."""
    return int(codes.view(torch.int8).max()) == 0x7F or int(codes.max()) == 0xFF


def _slice_size() -> int:
    return SLICE * torch.get_num_threads()


def _panels(w: ScaledTensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, those rows of the weight in float32), overwritten each time."""
    n, k = w.shape
    codes, scale, rows = w.codes.contiguous(), w.scale.contiguous(), w.granularity.tile[0]
    step = max(PANEL_ROWS, PANEL // max(k, 1))
    step = -(-step // rows) * rows if rows > 1 else step
    buffer = torch.empty(min(step, n), k)
    for start in range(0, n, step):
        stop = min(start + step, n)
        grid = scale[start // rows : -(-stop // rows)] if rows else scale
        dequantize_into(codes[start:stop], grid, w.spec, w.granularity, buffer[: stop - start])
        yield start, stop, buffer[: stop - start]


def _slices(
    granularity: Granularity, x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Matrices of whole tiles: views of contiguous x, of its scale as [tile rows, tile columns], and of out."""
    if not x.numel():
        return
    rows, k = granularity.tile[0], x.shape[-1]
    n = x.shape[-2] if rows > 1 and x.dim() > 1 else x.numel() // k  # scales of one row each: batch and rows are one
    whole = rows == 0
    step = max(1, _slice_size() // k)
    step = -(-step // rows) * rows if rows > 1 else step
    x, out = x.view(-1, n, k), out.view(-1, n, k)
    scale = scale.view(1, 1, 1) if whole else scale.view(len(x), -(-n // rows), -1)
    for batch in range(len(x)):
        for start in range(0, n, step):
            stop = min(start + step, n)
            grid = scale[0] if whole else scale[batch, start // rows : -(-stop // rows)]
            yield x[batch, start:stop], grid, out[batch, start:stop]


def _by_tile(
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    grid: torch.Tensor,
    granularity: Granularity,
) -> torch.Tensor:
    """op (div_ or mul_) between float32 [R, K] and the scale of its tiles, in place."""
    rows, cols = granularity.tile
    if rows > 1:
        grid = grid.repeat_interleave(rows, 0)[: len(values)]
    if not cols:
        op(values, grid)
        return values
    even = values.shape[1] // cols * cols
    if even:
        op(torch.unflatten(values[:, :even], 1, (-1, cols)), grid[:, : even // cols, None])
    if even < values.shape[1]:
        op(values[:, even:], grid[:, -1:])
    return values


def _amax(values: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """granularity.amax of a slice. As integers the bits of a float without its sign are in the order of magnitude."""
    bits = values.view(_INTS[values.itemsize])
    bits = bits & (0x7FFF if values.itemsize == 2 else 0x7FFFFFFF)
    rows, cols = granularity.tile
    if rows == 0:
        bits = bits.amax()
    else:
        bits = _fold(_fold(bits, rows, 0), cols or bits.shape[1], 1)
    found = bits.view(values.dtype).float()
    return found if bool(torch.isfinite(found).all()) else granularity.amax(values)


def _fold(bits: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """The maximum of each run of `size` along dim of [R, K]; the last run may be shorter."""
    if size == 1:
        return bits
    even = bits.shape[dim] // size * size
    parts = []
    if even:
        parts.append(torch.unflatten(bits.narrow(dim, 0, even), dim, (-1, size)).amax(dim + 1))
    if even < bits.shape[dim]:
        parts.append(bits.narrow(dim, even, bits.shape[dim] - even).amax(dim, keepdim=True))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
