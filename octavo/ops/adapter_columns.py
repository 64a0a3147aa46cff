"""An adapter's second product inside the FP8 product of its layer: as more columns of the contracted dimension.

x W^T + u B^T = [x | u] [W | B]^T, and FP8 products are so much faster than another pass over the result that u and B
may take three columns a rank: each is the sum of two E4M3 codes, u_1 + u_2 and b_1 + b_2, which round as finely as
bfloat16, and the columns are u_1 b_1 + u_1 b_2 + u_2 b_1. They share the scale of x's token and of W's row. Where the
values do not fit that scale, the token or row takes a larger one: its codes shrink by a power of two, which costs a
floating-point format nothing but its smallest values. Errors: docs/numerics.md.

For dX = [dY s | dU] [W | A]: the same with the bytes of W transposed, and the codes of A below them.

With scales per group of x and block of W (octavo.ops.groups) the columns are groups of their own; nothing shrinks.

Every function has two forms with the same bits, CUDA kernels and plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from octavo.formats.codec import decode, encode
from octavo.formats.granularity import PerBlock, PerGroup, PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.scale import power_of_two_above
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.ops import fused, groups

TERMS = 3
STEP = 16  # of the sizes that FP8 products take
COLUMNS = 128  # what they go through at once: fewer are no faster, and rows stay on lines of the cache
LEAST = 2.0**-100  # of scales: their inverse is finite, and so is what it multiplies
WARPS = 8  # of a block of threads, a row each
DOWNS = loader.Variant("downs.cu", ())
UPS = [loader.Variant("ups.cu", (("BLOCKS", blocks),)) for blocks in (0, 1)]


@dataclass(frozen=True)
class Downs:
    """The A [r_i, K] of the adapters of one input, R rows in all, as codes [room, K].

    The leading codes of all rows, their trailing codes, the leading ones again, zeros: a = (leading + trailing) * step.
    unit [R] float32: step, a power of two, times the adapter's scaling.
    """

    codes: torch.Tensor
    unit: torch.Tensor

    @property
    def rank(self) -> int:
        return self.unit.shape[0]

    @property
    def room(self) -> int:
        return self.codes.shape[0]


def room_for(k: int, rank: int, w: ScaledTensor | None = None) -> int:
    """The columns that adapters of `rank` in all add to a product over k; 0 where they cost more than they save.

    w: a weight of that product; where it has scales per block there is no other way.
    """
    return _columns(rank) if 2 * TERMS * rank <= k or (w is not None and isinstance(w.granularity, PerBlock)) else 0


def encode_downs(adapters: Sequence[torch.Tensor], scalings: Sequence[float]) -> Downs:
    """A of up to three adapters; any float dtype."""
    ends = list(accumulate(a.shape[0] for a in adapters))
    rank, k = ends[-1], adapters[0].shape[1]
    room, device = _columns(rank), adapters[0].device
    if not fused.on_kernels(adapters[0]):
        a = torch.cat([part.detach().float() for part in adapters])
        step = quantize_ref(a, E4M3, PerRow(), scale_format="po2").scale.clamp(min=LEAST)
        leading, trailing = _terms(a / step)
        codes = torch.cat([leading, trailing, leading, leading.new_zeros(room - TERMS * rank, k)])
        by = torch.cat([step.new_full((len(part),), s) for part, s in zip(adapters, scalings, strict=True)])
        return Downs(codes, step.flatten() * by)
    codes, unit = torch.empty((room, k), dtype=torch.uint8, device=device), torch.empty(rank, device=device)
    masters = [*(master(a) for a in adapters), None, None][:3]
    factors = [np.float32(s) for s in (*scalings, 0.0, 0.0)][:3]
    sizes = np.int32(ends[0]), np.int32(ends[min(1, len(ends) - 1)]), np.int32(rank), np.int32(k)
    grid = (rank + room - TERMS * rank,)
    loader.launch(DOWNS, grid, 256, (*masters, codes, unit, *factors, *sizes), codes, True)
    return Downs(codes, unit)


def append_products(
    q: ScaledTensor, downs: Downs, dtype: torch.dtype, seen: ScaledTensor | None = None
) -> tuple[ScaledTensor, torch.Tensor]:
    """q [M, K] with room behind its rows -> [q | u] [M, K + room], and scaling * q A^T [M, R] of `dtype`.

    seen: what dropout leaves of q for A, its scales the same.
    The codes and scales of q are those of the result: where a token's scale grows, they change. A token with NaN or Inf
    has scales of NaN, so that whatever is made of its codes is NaN too.
    """
    count, seen = -(-2 * downs.rank // STEP) * STEP, seen or q
    if isinstance(q.granularity, PerGroup):
        a = downs.codes[:count]
        unscaled = torch.ones(groups.BLOCK.scale_shape(tuple(a.shape)), device=a.device)
        sums = groups.product(seen, ScaledTensor(a, unscaled, E4M3, groups.BLOCK), torch.bfloat16)
    else:  # the sums of codes as they are, in long sums: this product is bound by reading q
        one, whole = _one(q.codes.device), F.ScalingType.TensorWise
        a = downs.codes[:count].view(E4M3.dtype)
        sums = F.scaled_mm(seen.as_float8(), a.mT, one, whole, one, whole, output_dtype=torch.bfloat16)
    low = torch.empty((q.shape[0], downs.rank), dtype=torch.bfloat16, device=sums.device)
    return _append(q, sums, downs, low), low.to(dtype)


def append_gradients(q: ScaledTensor, low: torch.Tensor, downs: Downs) -> ScaledTensor:
    """q [M, N] per token with room behind its rows, low [M, R] -> [q | low * unit], as in `append_products`."""
    return _append(q, low, downs, None)


def extended(w: ScaledTensor, b: torch.Tensor, begin: int, downs: Downs) -> ScaledTensor:
    """[W | B] [N, K + room], B [N, r] that of the adapter whose rows of A begin at `begin`."""
    blocks = isinstance(w.granularity, PerBlock)
    w = w if blocks else w.per_row()
    (n, k), rank, columns = w.shape, b.shape[1], _range(w.shape[1])
    if not fused.on_kernels(w.codes):
        if blocks:
            return _extended_blocks(w, b, begin, downs)
        unit = downs.unit[begin : begin + rank]
        nothing = w.scale.abs() < LEAST
        own, own_codes = torch.where(nothing, 1.0, w.scale), torch.where(nothing, 0, w.codes)
        product = b.detach().float() * unit
        largest = _largest(product / (columns * own))
        zeros = (own_codes & 0x7F).amax(1, keepdim=True) == 0
        fit = torch.where(torch.isfinite(largest) & (largest > 0), _fit(largest), 1.0)
        shrunk = torch.where(zeros, fit, _shrinkage(largest))
        leading, trailing = _terms(product / (columns * (own * shrunk)))
        codes = _with_terms(_shrink(own_codes, shrunk), leading, trailing, begin, downs)
        return ScaledTensor(codes, own * shrunk, E4M3, PerRow())
    codes = torch.empty((n, k + downs.room), dtype=torch.uint8, device=w.codes.device)
    scale = torch.empty(w.granularity.scale_shape((n, k + downs.room)), device=w.codes.device)
    sizes = (np.int32(size) for size in (n, k, rank, begin, downs.rank, downs.room))
    arguments = w.codes, w.scale, master(b), downs.unit, codes, scale, np.float32(columns), *sizes
    loader.launch(UPS[blocks], (-(-n // WARPS),), 32 * WARPS, arguments, codes, True)
    return ScaledTensor(codes, scale, E4M3, w.granularity)


def _extended_blocks(w: ScaledTensor, b: torch.Tensor, begin: int, downs: Downs) -> ScaledTensor:
    product = b.detach().float() * downs.unit[begin : begin + b.shape[1]]
    scale = _scale_of_largest(_largest(product.reshape(len(b) // 128, -1)))
    leading, trailing = _terms(product / scale.repeat_interleave(128, 0))
    codes = _with_terms(w.codes, leading, trailing, begin, downs)
    return ScaledTensor(codes, torch.cat([w.scale, scale.expand(-1, downs.room // 128)], dim=1), E4M3, w.granularity)


def _with_terms(
    codes: torch.Tensor, leading: torch.Tensor, trailing: torch.Tensor, begin: int, downs: Downs
) -> torch.Tensor:
    n, k = codes.shape
    wide = torch.cat([codes, codes.new_zeros(n, downs.room)], dim=1)
    for i, part in enumerate((leading, trailing, leading)):
        wide[:, k + begin + i * downs.rank :][:, : part.shape[1]] = part
    return wide


def _append(q: ScaledTensor, low: torch.Tensor, downs: Downs, kept: torch.Tensor | None) -> ScaledTensor:
    """kept: what `append_products` returns beside its codes, to fill; low are sums of codes then."""
    (m, k), rank, room, columns = q.shape, downs.rank, downs.room, _range(q.shape[1])
    grouped = isinstance(q.granularity, PerGroup)
    scale = q.scale.as_strided((m, (k + room) // 128), q.scale.stride()) if grouped else q.scale
    codes = q.codes.as_strided((m, k + room), (q.codes.stride(0), 1))
    if not fused.on_kernels(q.codes):
        own = torch.ones_like(low[:, :1], dtype=torch.float32) if grouped else q.scale
        if kept is None:
            u = low.float() * downs.unit / own
        else:
            total = low[:, :rank].float() + low[:, rank : 2 * rank].float()
            kept.copy_(total * (own * downs.unit))
            u = total if grouped else total * columns
        shrunk = _scale_of_largest(_largest(u)) if grouped else _shrinkage(_largest(u))
        leading, trailing = _terms(u / shrunk)
        if grouped:
            scale[:, k // 128 :] = shrunk
        else:
            codes[:, :k] = _shrink(q.codes, shrunk)
            scale.mul_(shrunk)
        scale.masked_fill_(~torch.isfinite(u).all(1, keepdim=True), torch.nan)
        codes[:, k:] = torch.cat([leading, leading, trailing, codes.new_zeros(m, room - TERMS * rank)], dim=1)
    elif m:
        variant, grid, sizes = _append_kernel(low.dtype, kept is not None, grouped, m, k, rank, room)
        strides = np.int32(low.stride(0)), np.int64(codes.stride(0)), np.int64(scale.stride(1))
        arguments = low, downs.unit, codes, scale, kept, *sizes, *strides
        loader.launch(variant, grid, 32 * WARPS, arguments, low, True)
    return ScaledTensor(codes, scale, E4M3, q.granularity)


@lru_cache(maxsize=1024)
def _append_kernel(
    dtype: torch.dtype, forward: bool, grouped: bool, m: int, k: int, rank: int, room: int
) -> tuple[loader.Variant, tuple[int], tuple[np.generic, ...]]:
    """The variant, the grid, and the arguments that are sizes. Kept: steps repeat."""
    forms = ("X_BF16", int(dtype == torch.bfloat16)), ("FORWARD", int(forward)), ("GROUPED", int(grouped))
    sizes = np.float32(_range(k)), np.int64(m), np.int32(k), np.int32(rank), np.int32(room)
    return loader.Variant("append.cu", forms), (-(-m // WARPS),), sizes


def _columns(rank: int) -> int:
    return -(-TERMS * rank // COLUMNS) * COLUMNS


def _range(k: int) -> float:
    """What sums of k products of codes are multiplied by to be codes: up to 100 for normally distributed values."""
    return 2.0 ** -(8 + -(-(k - 1).bit_length() // 2))


def _terms(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    finite = torch.where(torch.isfinite(value), value, torch.nan)
    leading = encode(finite, E4M3)
    return leading, encode(finite - decode(leading, E4M3), E4M3)


def _largest(value: torch.Tensor) -> torch.Tensor:
    """Of each row; NaN counts as nothing, Inf as itself."""
    return value.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(1, keepdim=True)


def _fit(largest: torch.Tensor) -> torch.Tensor:
    return power_of_two_above(largest / torch.full_like(largest, E4M3.max))


def _scale_of_largest(largest: torch.Tensor) -> torch.Tensor:
    fits = torch.isfinite(largest) & (largest > 0)
    return torch.where(fits, largest / torch.full_like(largest, E4M3.max), 1.0)


def _shrinkage(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(largest) & (largest > E4M3.max), _fit(largest), 1.0)


def _shrink(codes: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    nan = (codes & 0x7F) == 0x7F
    return torch.where(nan | (by == 1.0), codes, encode(decode(codes, E4M3) / by, E4M3))


def master(part: torch.Tensor) -> torch.Tensor:
    """Float32, contiguous, on 16 bytes."""
    part = part.detach()
    if part.dtype != torch.float32 or not part.is_contiguous():
        part = part.float().contiguous()
    return part if part.data_ptr() % 16 == 0 else part.clone()


@lru_cache(maxsize=16)
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)
