"""Backend `w8a16`: FP8 weights times 16-bit inputs, SM80 and later. No FP8 units needed.

kernels/plans.py chooses: few tokens (decoding) and some hundred have kernels that read the codes once and decode them
in registers; with FP8 tensor cores inputs may be split into two E4M3 terms; for many tokens the weight is decoded into
a 16-bit matrix that lives for one product.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.kernels.plans import Block, Operands, Panels, Plan, Ring, TermBlock, Terms, plan_dx, plan_product
from octavo.kernels.tiling import row_block
from octavo.ops import dequant, native
from octavo.ops.backends import gpu_of, tokens_on


def linear(
    x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, activation: str, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] @ w [N, K]^T + bias -> [M, N], float32 sums; few tokens: exact weights and one rounding."""
    return product(x, w, bias, plan_for(x, w))


def plan_for(x: torch.Tensor, w: ScaledTensor) -> Plan:
    """What `linear` takes."""
    return _plan(x.shape[0], *w.shape, Operands(x.dtype == torch.bfloat16, w.spec == E4M3, _scales(w)), x.device)


@lru_cache(maxsize=8192)
def _plan(m: int, n: int, k: int, operands: Operands, device: torch.device) -> Plan:
    gpu = gpu_of(device)
    return plan_product(m, n, k, operands, gpu, tokens_on(gpu.sm))


def product(x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
    """`linear` by the kernel and tile of `plan`."""
    bias = bias.to(x.dtype).contiguous() if bias is not None else None
    if isinstance(plan, Panels):
        return _in_panels(x, w, bias, plan)
    if isinstance(plan, Terms):
        return _in_two_terms(x, w, bias)
    m, (n, k) = x.shape[0], w.shape
    if x.stride(1) != 1 or x.stride(0) % 8:
        x = x.contiguous()
    x, codes, scale = _on_16_bytes(x), _on_16_bytes(w.codes.contiguous()), w.scale.contiguous()
    y = x.new_empty(m, n)
    sizes = np.int32(m), np.int32(n), np.int32(k)
    kernel = variant(plan, x.dtype, w, m)
    if isinstance(plan, Ring):
        grid, few = plan.grid(n, loader.limits(x.device)[0]), (codes, scale, x, bias, y, *sizes, np.int64(x.stride(0)))
        loader.launch(kernel, grid, plan.threads, few, x, bool(plan.overlap))
        return y
    parts = torch.empty((plan.splits, m, n), device=x.device) if plan.splits > 1 else None
    results = None if plan.splits > 1 else bias, y, parts
    if isinstance(plan, TermBlock):
        arguments = codes, scale, *_two_terms(x, m, 1), *results, *sizes
        loader.launch(kernel, plan.grid(m, n), plan.threads, arguments, x, True)
    else:
        loader.launch(
            kernel, plan.grid(m, n), plan.threads, (codes, scale, x, *results, *sizes, np.int64(x.stride(0))), x
        )
    if parts is not None:
        _sum(parts, bias, y)
    return y


def variant(plan: Ring | Block | TermBlock, dtype: torch.dtype, w: ScaledTensor, m: int) -> loader.Variant:
    """The kernel of `plan` for m inputs of this dtype and weights like w."""
    defines = {"X_BF16": int(dtype == torch.bfloat16), "SCALES": _scales(w)}
    if not isinstance(plan, TermBlock):
        defines["E5M2"] = int(w.spec.name == "e5m2")
    return loader.Variant(plan.source, (*defines.items(), *plan.defines), plan.dynamic_bytes(m, w.shape[1]))


def linear_dx(grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor:
    """grad [M, N] @ w [N, K] -> [M, K], from the same codes."""
    return product_dx(grad, w, plan_dx(grad.shape[0], w.shape[1], tokens_on(gpu_of(grad.device).sm)))


def product_dx(grad: torch.Tensor, w: ScaledTensor, plan: Panels) -> torch.Tensor:
    """`linear_dx` in panels of columns of w, so that every result is written once."""
    n, k = w.shape
    if plan.size >= k:
        return grad @ dequantize(w, grad.dtype)
    y = grad.new_empty(grad.shape[0], k)
    wide = torch.empty(n * plan.size, dtype=grad.dtype, device=grad.device)
    for begin in range(0, k, plan.size):
        end = min(k, begin + plan.size)
        panel = wide[: n * (end - begin)].view(n, end - begin)
        _decode(w, panel, slice(0, n), slice(begin, end))
        torch.mm(grad, panel, out=y[:, begin:end])
    return y


def dequantize(q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """code * scale in float32, rounded once to `dtype`: the bits of the reference, NaN codes included."""
    if q.codes.dim() != 2:  # stacked matrices, each with scales of its own
        return dequant.dequantize(q, dtype)
    n, k = q.shape
    out = torch.empty((n, k), dtype=dtype, device=q.codes.device)
    _decode(q, out, slice(0, n), slice(0, k))
    return out


def _in_panels(x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None, plan: Panels) -> torch.Tensor:
    """The weight decoded `plan.size` rows at a time into one buffer, which so stays in the L2 cache."""
    n, k = w.shape
    if plan.size >= n:
        wide = dequantize(w, x.dtype)
        return torch.addmm(bias, x, wide.mT) if bias is not None else x @ wide.mT
    y = x.new_empty(x.shape[0], n)
    wide = torch.empty(plan.size, k, dtype=x.dtype, device=x.device)
    for begin in range(0, n, plan.size):
        end = min(n, begin + plan.size)
        panel, out = wide[: end - begin], y[:, begin:end]
        _decode(w, panel, slice(begin, end), slice(0, k))
        if bias is None:
            torch.mm(x, panel.mT, out=out)
        else:
            torch.addmm(bias[begin:end], x, panel.mT, out=out)
    return y


def _in_two_terms(x: torch.Tensor, w: ScaledTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x = high + low, both E4M3, through the FP8 tensor cores as 2M rows, and the halves of the result added."""
    m, k = x.shape
    half = m + m % 2  # products with scales per block take rows by fours; one more row is nobody's
    codes, scale = _two_terms(x, half, 32)
    terms = ScaledTensor(codes, scale, E4M3, PerRow())
    if isinstance(w.granularity, PerBlock):
        terms = ScaledTensor(codes, scale.expand(-1, k // 128), E4M3, PerGroup(128))
    y = x.new_empty(m, w.shape[0])
    _sum(native.scaled_mm(terms, w, x.dtype, short_sums=False).view(2, half, -1), bias, y)
    return y


def _two_terms(x: torch.Tensor, half: int, finer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 x [M, K] -> codes [2 half, K] and scales [2 half, 1]: high terms from row 0 on, low ones from `half`.

    finer: the scales of low terms are so much smaller; with 1 they are those of the high ones, and not written again.
    """
    m, k = x.shape
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    codes, scale = x.new_empty((2 * half, k), dtype=torch.uint8), torch.empty((2 * half, 1), device=x.device)
    block = row_block(k)
    defines = ("X_BF16", 1), ("FINER", finer), ("THREADS", block.threads), ("ROUNDS", block.rounds)
    sizes = np.int32(half), np.int32(k), np.int64(x.stride(0))
    loader.launch(loader.Variant("split.cu", defines), (m,), block.threads, (x, codes, scale, *sizes), x, True)
    return codes, scale


def _sum(parts: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """y [M, N] = the sum of parts [count, at least M, N] in order, + bias."""
    m, n = y.shape
    width = 8 if n % 8 == 0 else 1
    defines = {
        "X_BF16": int(y.dtype == torch.bfloat16),
        "PARTS_FLOAT": int(parts.dtype == torch.float32),
        "WIDTH": width,
    }
    kernel = loader.Variant("w8a16_sum.cu", tuple(defines.items()))
    sizes = np.int32(len(parts)), np.int64(parts.stride(0)), np.int32(m), np.int32(n)
    loader.launch(kernel, (-(-m * n // (256 * width)),), 256, (parts, bias, y, *sizes), y, True)


def _decode(q: ScaledTensor, out: torch.Tensor, rows: slice, columns: slice) -> None:
    """Rows and columns of q, which begin on a multiple of 128, into `out`."""
    n, k = out.shape
    codes = q.codes.contiguous()[rows, columns]
    blocks = q.scale.reshape(-1) if _scales(q) < 2 else q.scale.contiguous()
    if _scales(q) == 1:
        blocks = blocks[rows]
    elif _scales(q) == 2:
        blocks = blocks[rows.start // 128 :, columns.start // 128 :]
    aligned = k % 16 == 0 and codes.stride(0) % 16 == 0 and codes.data_ptr() % 16 == 0
    defines = {"OUT_BF16": int(out.dtype == torch.bfloat16), "SCALES": _scales(q), "ALIGNED": int(aligned)}
    segments = -(-k // 16)
    sizes = np.int32(n), np.int32(k), np.int32(segments), np.int64(codes.stride(0)), np.int32(blocks.stride(0))
    kernel = loader.Variant("dequantize.cu", tuple(defines.items()))
    loader.launch(kernel, (-(-n * segments // 256),), 256, (codes, blocks, out, *sizes), out)


def _scales(q: ScaledTensor) -> int:
    return 0 if isinstance(q.granularity, PerTensor) else 1 if isinstance(q.granularity, PerRow) else 2


def _on_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view may begin anywhere; the kernel loads 16 bytes at once. An allocation begins on 512."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
