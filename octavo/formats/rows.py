"""Power-of-two scales of tiles as one scale per row: the same values for kernels that take rows."""

from __future__ import annotations

import torch

from octavo.base.errors import RefusedError
from octavo.formats.codec import decode, encode
from octavo.formats.granularity import PerRow
from octavo.formats.scale import ZERO_TILE_SCALE, is_power_of_two
from octavo.formats.scaled import ScaledTensor

PIECE = 1 << 20  # codes at a time


def as_rows(q: ScaledTensor) -> tuple[ScaledTensor, int]:
    """q [N, K] with one scale a row, and how many codes are another value now.

    The scale of a row is the largest of its tiles that hold anything; codes of the others are divided by a power of
    two, which changes a code only where it becomes subnormal and has more bits than are left. RefusedError: a scale
    that is no power of two.
    """
    rows, columns = q.granularity.tile
    if rows * columns == 0 or not bool(is_power_of_two(q.scale).all()):
        got = f"{q.granularity} scales" + (" that are no powers of two" if rows * columns else "")
        raise RefusedError("scales of tiles as one a row", got=got, need="powers of two per group or block")
    n, k = q.shape
    filled = q.granularity.reduce((q.codes & 0x7F).ne(0).float()) > 0
    largest = torch.where(filled, q.scale, 0.0).amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, ZERO_TILE_SCALE)
    shift = (q.scale / largest).clamp(max=1.0)  # that of an empty tile means nothing
    codes, changed, step = torch.empty_like(q.codes), 0, rows * max(1, PIECE // (k * rows))
    for begin in range(0, n, step):
        old = q.codes[begin : begin + step]
        value = decode(old, q.spec)
        tiles = shift[begin // rows : -(-(begin + step) // rows)]
        wanted = value * tiles.repeat_interleave(rows, 0)[: len(old)].repeat_interleave(columns, 1)[:, :k]
        new = torch.where(value.isfinite().logical_not(), old, encode(wanted, q.spec))
        changed += int((decode(new, q.spec).ne(wanted) & value.isfinite()).sum())
        codes[begin : begin + step] = new
    return ScaledTensor(codes, largest.repeat_interleave(rows, 0)[:n].contiguous(), q.spec, PerRow()), changed
