"""One pass over a tensor's bytes, a slice at a time: the largest code of every tile, and a sample of rows for the rest.

NumPy on integer views: SIMD `&` and `maximum.reduce` run at several GB/s, a table look-up or a float cast at 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.formats.codec import decode_table
from octavo.formats.spec import E4M3
from octavo.store.tensors import Checkpoint

Array = npt.NDArray[Any]

SLICE = 8 << 20  # bytes of a tensor looked at in one step
SAMPLE_EVERY = 64  # rows; a sample of 1.6 % costs less than the full pass
NAN_CODE = 0x7F
TOP_CODE = 0x7E  # 448
HALF_CODE = 0x76  # 224: what an absmax scale, rounded up to a power of two at worst, leaves a tile above

_SQUARES: Array = (decode_table(E4M3).nan_to_num(0.0).numpy().astype(np.float32)) ** 2

# Exponent bits of 16- and 32-bit floats: all set means Inf or NaN.
_EXPONENTS: dict[torch.dtype, tuple[torch.dtype, Any, int]] = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
}


@dataclass
class TileStats:
    """peak: largest code magnitude of each tile, uint8. mean_square: of the sampled codes of each tile, without scale.

    columns: largest code of each column. zeros, tops, below: share of zero, +-448 and +-416 codes among the `sampled`.
    size: number of all codes.
    """

    peak: Array
    mean_square: Array
    columns: Array
    zeros: float
    tops: float
    below: float
    sampled: int
    size: int

    @property
    def nan_tiles(self) -> int:
        return int((self.peak == NAN_CODE).sum())


def scan_codes(checkpoint: Checkpoint, name: str, tile: tuple[int, int]) -> TileStats:
    """E4M3 codes [N, K], or [E, N, K] seen as one matrix; tile: (rows, columns), 0 for the whole extent of columns."""
    shape = checkpoint.shape(name)
    rows, cols = prod(shape[:-1]), shape[-1]
    tile_rows, tile_cols = tile[0] or 1, tile[1] or cols
    step = max(tile_rows, SLICE // max(cols, 1) // tile_rows * tile_rows)
    buffer = np.empty((min(step, rows), cols), dtype=np.uint8)
    peaks: list[Array] = []
    squares: list[Array] = []
    columns = np.zeros(cols, dtype=np.uint8)
    zeros = tops = below = sampled = 0
    for start in range(0, rows, step):
        codes = checkpoint.matrix(name, start, min(start + step, rows)).view(torch.uint8).numpy()
        masked = np.bitwise_and(codes, 0x7F, out=buffer[: len(codes)])
        by_row = _fold_rows(masked, tile_rows)
        np.maximum(columns, by_row.max(0), out=columns)
        peaks.append(_fold_columns(by_row, tile_cols))
        sample, owner = _sample(masked, tile_rows)
        zeros += sample.size - int(np.count_nonzero(sample))
        tops += int(np.count_nonzero(sample == TOP_CODE))
        below += int(np.count_nonzero(sample == TOP_CODE - 1))
        sampled += sample.size
        squares.append(_mean_squares(sample, owner, len(peaks[-1]), tile_cols))
    share = max(sampled, 1)
    shares = (zeros / share, tops / share, below / share)
    return TileStats(np.concatenate(peaks), np.concatenate(squares), columns, *shares, sampled, rows * cols)


def _fold_rows(masked: Array, tile_rows: int) -> Array:
    if tile_rows == 1:
        return masked
    whole = len(masked) // tile_rows * tile_rows
    folded: Array = np.maximum.reduce(masked[:whole].reshape(-1, tile_rows, masked.shape[1]), axis=1)
    if whole < len(masked):
        folded = np.concatenate([folded, np.maximum.reduce(masked[whole:], axis=0)[None]])
    return folded


def _fold_columns(x: Array, tile_cols: int) -> Array:
    if tile_cols >= x.shape[1]:
        whole: Array = np.maximum.reduce(x, axis=1)[:, None]
        return whole
    tiles: Array = np.maximum.reduceat(x, np.arange(0, x.shape[1], tile_cols), axis=1)
    return tiles


def _sample(masked: Array, tile_rows: int) -> tuple[Array, Array]:
    """Every SAMPLE_EVERY-th row, at least two of a tile row, and the tile row that each belongs to."""
    every = min(SAMPLE_EVERY, max(tile_rows // 2, 1)) if tile_rows > 1 else SAMPLE_EVERY
    picked = np.arange(0, len(masked), every)
    return masked[picked], picked // tile_rows


def _mean_squares(sample: Array, owner: Array, tile_rows: int, tile_cols: int) -> Array:
    squares = _SQUARES[sample]
    starts = np.arange(0, sample.shape[1], tile_cols)
    widths = np.diff(np.append(starts, sample.shape[1]))
    by_cols = np.add.reduceat(squares, starts, axis=1)
    total = np.full((tile_rows, len(starts)), np.nan, dtype=np.float64)
    count = np.bincount(owner, minlength=tile_rows)
    seen = np.flatnonzero(count)
    firsts = np.searchsorted(owner, seen)
    total[seen] = np.add.reduceat(by_cols, firsts, axis=0) / (widths[None, :] * count[seen, None])
    return total


def decode_fast(codes: Array) -> Array:
    """E4M3 bytes -> float32, exact; NaN codes become +-480 (the scan has reported them).

    Exponent and mantissa move to where float32 has them, which leaves the value 2**-120 too small, subnormals too.
    """
    bits = codes.astype(np.int32)
    sign = (bits & 0x80) << 24
    bits &= 0x7F
    bits <<= 20
    bits |= sign
    values: Array = bits.view(np.float32)
    values *= np.float32(2.0**120)
    return values


def as_float32(x: torch.Tensor) -> Array:
    """Any float tensor as a float32 array; BF16 by moving its bits, which is exact and stays in this thread."""
    if x.dtype == torch.bfloat16:
        bits = x.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        bits <<= 16
        wide: Array = bits.view(np.float32)
        return wide
    values: Array = x.float().numpy()
    return values


def has_nonfinite(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a 16- or 32-bit tensor holds an Inf or a NaN."""
    dtype, shape = checkpoint.dtype(name), checkpoint.shape(name)
    if dtype not in _EXPONENTS or 0 in shape:
        return False
    signed, unsigned, mask = _EXPONENTS[dtype]
    width, rows = prod(shape[1:]), shape[0] if shape else 1
    step = max(1, SLICE // (width * dtype.itemsize))
    buffer = np.empty(min(step, rows) * width, dtype=unsigned)
    for start in range(0, rows, step):
        part = checkpoint.rows(name, start, start + step) if shape else checkpoint.get(name)
        bits = part.reshape(-1).view(signed).numpy().view(unsigned)
        if int(np.bitwise_and(bits, unsigned(mask), out=buffer[: len(bits)]).max()) == mask:
            return True
    return False
