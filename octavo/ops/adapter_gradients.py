"""Gradients of LoRA adapters, each from one pass over what is long: dA from the codes of the input, dB and dU from dY.

U = x A^T, y = U B^T: dB = dY^T U, dU = dY B, dA = dU^T x. Blocks of a kernel add up tokens or columns of their own; the
parts are added in one order, so that gradients have the same bits every time.

Every function has two forms, CUDA kernels and plain torch, which differ in the order of additions.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from octavo.formats.granularity import PerGroup
from octavo.formats.reference import dequantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.kernels.cuda import loader
from octavo.ops import fused
from octavo.ops.adapter_columns import master

MOST_RANKS = 48  # whose sums a block of over_tokens.cu holds in registers
AT_ONCE = {1: 4, 2: 3, 3: 2}  # blocks of it that a multiprocessor takes, by sixteens of ranks
MOST_COLUMNS = 32  # ranks that low_gradients.cu takes
STRIP, TOKENS = 512, 16  # columns of one of its blocks, tokens of a stage
SUM_PARTS = loader.Variant("sum_parts.cu", ())


def over_tokens(low: torch.Tensor, q: ScaledTensor) -> torch.Tensor:
    """low [M, R]^T @ dequantize(q) [M, K], from the codes: float32 parts [P, R, K] of the sum, for `add_parts`.

    Operands are as exact as bfloat16.
    """
    (m, k), rank = q.shape, low.shape[1]
    if not fused.on_kernels(low) or not m:
        return (low.float().mT @ dequantize_ref(q))[None]
    low, grouped, multiprocessors = low.contiguous(), isinstance(q.granularity, PerGroup), loader.limits(low.device)[0]
    columns = -(-k // 256)
    chunk = _chunk(m, columns, AT_ONCE[-(-min(rank, MOST_RANKS) // 16)] * multiprocessors, 128)
    chunks = -(-m // chunk)
    sums = torch.empty((chunks, rank, k), device=low.device)
    for begin in range(0, rank, MOST_RANKS):
        part = (
            sums if rank <= MOST_RANKS else torch.empty((chunks, min(MOST_RANKS, rank - begin), k), device=low.device)
        )
        ranks = -(-part.shape[1] // 16)
        aligned = rank % 8 == 0 and low.data_ptr() % 16 == 0
        strides = (np.int64(size) for size in (q.codes.stride(0), rank, q.scale.stride(1)))
        arguments = q.codes, q.scale, low[:, begin:], part, np.int64(m), np.int32(k), np.int32(part.shape[1]), *strides
        arguments = *arguments, np.int32(chunk)
        variant = _over_tokens(low.dtype == torch.bfloat16, ranks, aligned, grouped)
        loader.launch(variant, (columns, chunks), 128, arguments, low, True)
        if part is not sums:
            sums[:, begin : begin + MOST_RANKS] = part
    return sums


@lru_cache
def _over_tokens(bf16: bool, ranks: int, aligned: bool, grouped: bool) -> loader.Variant:
    forms = ("X_BF16", int(bf16)), ("RANKS", ranks), ("ALIGNED", int(aligned)), ("GROUPED", int(grouped))
    return loader.Variant("over_tokens.cu", forms)


def over_output(dy: torch.Tensor, low: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """dy [M, N] @ b [N, r] -> `into` [M, r], of the dtype of dy; returns dy^T @ low [N, r] float32.

    low [M, r] of the dtype of dy, b of any, multiplied in that of dy.
    """
    (m, n), rank = dy.shape, b.shape[1]
    if not fused.on_kernels(dy) or dy.dtype != torch.bfloat16 or rank > MOST_COLUMNS or n % 8 or not m:
        into.copy_(dy @ b.to(dy.dtype))
        return (dy.mT @ low).float()
    variant, strips, chunks, sizes = _low_gradients(m, n, rank, low.stride(0), dy.device)
    pitch = 16 * -(-rank // 16)
    du = torch.empty((strips, m, pitch), device=dy.device)
    db = torch.empty((chunks, n, pitch), device=dy.device)
    loader.launch(variant, (strips, chunks), 256, (dy, master(b), low, du, db, *sizes), dy, True)
    return add_parts(db, rank, others=(du, into))


@lru_cache(maxsize=1024)
def _low_gradients(
    m: int, n: int, rank: int, low_pitch: int, device: torch.device
) -> tuple[loader.Variant, int, int, tuple[np.generic, ...]]:
    """The variant, strips of columns, chunks of tokens, and the arguments that are sizes. Kept: steps repeat."""
    ranks, strips = -(-rank // 16), -(-n // STRIP)
    chunk = _chunk(m, strips, (3 - ranks) * loader.limits(device)[0], TOKENS)
    stages = 4 * ranks
    variant = loader.Variant("low_gradients.cu", (("RANKS", ranks), ("STAGES", stages)), stages * 2 * STRIP * TOKENS)
    sizes = np.int64(m), np.int32(n), np.int32(rank), np.int64(low_pitch), np.int32(chunk)
    return variant, strips, -(-m // chunk), sizes


def _chunk(m: int, columns: int, blocks: int, multiple: int) -> int:
    """Tokens a block, so that all blocks, `columns` for each chunk of tokens, run at once where that is possible."""
    return multiple * -(-m // (multiple * max(1, blocks // columns)))


def add_parts(
    parts: torch.Tensor,
    columns: int,
    factor: float = 1.0,
    others: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """parts [P, M, >= columns] float32, contiguous, summed over P, times factor -> [M, columns] float32.

    others: parts of as many columns, whose sum goes to a bfloat16 matrix in the same launch.
    """
    count, m, pitch = parts.shape
    if not fused.on_kernels(parts) or pitch % 4:
        if others is not None:
            others[1].copy_(others[0][..., :columns].sum(0))
        return parts[..., :columns].sum(0) * factor
    other, narrow = others or (None, None)
    beside = (*other.shape[:2], narrow.stride(0)) if other is not None and narrow is not None else (0, 0, 0)
    grid, first, second = _sum_parts(count, m, pitch, columns, factor, *beside)
    to = torch.empty((m, columns), device=parts.device)
    loader.launch(SUM_PARTS, grid, 256, (parts, to, *first, other, narrow, *second), to, True)
    return to


@lru_cache(maxsize=1024)
def _sum_parts(
    count: int, m: int, pitch: int, columns: int, factor: float, beside: int, rows: int, to_pitch: int
) -> tuple[tuple[int], tuple[np.generic, ...], tuple[np.generic, ...]]:
    """The grid, and the arguments that are sizes: before the other parts and behind them."""
    grid = (-(-(m + rows) * -(-columns // 4) // 256),)
    second = np.int32(beside), np.int64(rows), np.int64(to_pitch), np.int32(columns), np.int32(pitch)
    return grid, (np.float32(factor), np.int32(count), np.int64(m)), second
