"""LoRA over frozen FP8 weights with FP8 products both ways: autograd functions that decide what is kept for backward.

A group of projections that read the same input quantizes it once, keeps the codes (never a 16-bit copy) and gets its
dX as one product over the outputs of all: scales of W's rows, which lie on the contracted dimension, are folded into
the quantization of dY, and what is left of W is its bytes, transposed. Adapters multiply in the dtype of x from
masters of any dtype; forward and backward see the same dequantized input. An RMSNorm before the group is part of it:
its output is never written. The adapters' second products are columns of the FP8 products (octavo.ops.adapter_columns).
Dropout on the adapters' input takes codes of it (octavo.ops.dropout).

Weights are E4M3 per row or tensor with inputs quantized per token, or per 128 x 128 block with inputs per group of 128;
one kind in a group. Shapes: x [..., K], W [N, K], A [r, K], B [N, r].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from octavo.formats.scaled import ScaledTensor
from octavo.ops import adapter_columns, adapter_gradients, fused, groups, native
from octavo.ops.dropout import Dropout, add_kept, dropped_codes
from octavo.ops.projections import (
    Norm,
    Operand,
    Projection,
    adapters_of,
    by_blocks,
    downs_of,
    dropout_of,
    kept_input,
    kept_operand,
    operand_of,
    products_of,
    quantize_input,
    quantize_sum,
    rank_of,
    room_of,
    room_of_gradients,
    row_scales,
    steps_of,
)

__all__ = ["Norm", "Projection", "gated_mlp", "project"]


def project(
    x: torch.Tensor,
    projections: Sequence[Projection],
    norm: Norm | None = None,
    *,
    x_stays: bool = False,
    pass_on: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The outputs [..., N_i] of projections that read the same x, or norm(x). Up to three; dtype of x, 16 bit.

    Gradients go to x, A and B; never to W, bias or the norm. x_stays: whoever made x keeps it (attention its output),
    so it is quantized again in the backward pass instead of keeping codes as well. pass_on: x is the last output, whose
    gradient is added where the others' meet: for a residual.
    """
    adapters = [part for projection in projections for part in projection.adapter]
    settings = norm, tuple(projections), dropout_of(projections), x_stays, pass_on
    outputs: tuple[torch.Tensor, ...] = _Project.apply(x, *settings, *adapters)  # type: ignore[no-untyped-call]
    return outputs


def gated_mlp(
    x: torch.Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    activation: str,
    norm: Norm | None = None,
    *,
    residual: bool = False,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) with x or norm(x) -> [..., K], plus x where it is a residual.

    gate(x) and up(x) are kept as codes per token. delta [..., K]: x + delta is the input, and the residual.
    """
    adapters = [part for projection in (gate, up, down) for part in projection.adapter]
    left: list[_Left] = []
    dropouts = dropout_of((gate, up)), dropout_of((down,))
    settings = norm, (gate, up, down), dropouts, activation, residual, left
    stand_in = _GatedMlp.apply(x, delta, *settings, *adapters)  # type: ignore[no-untyped-call]
    y: torch.Tensor = _LastProduct.apply(stand_in, left.pop())  # type: ignore[no-untyped-call]
    return y


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm: Norm | None,
        projections: tuple[Projection, ...],
        dropout: Dropout | None,
        x_stays: bool,
        pass_on: bool,
        *adapters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        flat = _matrix(x)
        q, rstd = quantize_input(flat, norm, projections, room_of(flat.shape[1], projections))
        operand = operand_of(q, projections, x.dtype, dropout)
        outputs = products_of(operand, projections, x.dtype)
        ctx.norm, ctx.projections, ctx.shape, ctx.dtype, ctx.dropout = norm, projections, x.shape, x.dtype, dropout
        kept = (None, None) if x_stays else (q.codes, q.scale)
        x_kept = flat if x_stays or _needs_x(norm, projections) else None
        ctx.save_for_backward(x_kept, rstd, *kept, *operand.kept, *adapters)
        results = tuple(y.reshape(*x.shape[:-1], y.shape[1]) for y in outputs)
        return (*results, x.view_as(x)) if pass_on else results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, rstd, codes, scale, *rest = ctx.saved_tensors
        kept, adapters = rest[:3], rest[3:]
        projections = _with_adapters(ctx.projections, adapters)
        flat = [_matrix(grad) for grad in grads]
        residual = flat.pop() if len(flat) > len(projections) else None
        if codes is None:
            q = quantize_input(x, ctx.norm, projections, 0)[0]
        else:
            q = kept_input(codes, scale, projections)
        steps = _Backward(projections, flat, kept_operand(q, kept, ctx.dropout), ctx.dtype)
        dx = steps.input_gradient() if ctx.needs_input_grad[0] else None
        dx = _through_norm(dx, x, q, ctx.norm, rstd, ctx.shape, residual)
        return dx, *[None] * 5, *steps.adapter_gradients(ctx.needs_input_grad[6:])


@dataclass(frozen=True)
class _Left:
    """What an MLP leaves to its last product."""

    operand: Operand
    down: Projection
    residual: torch.Tensor | None


class _GatedMlp(torch.autograd.Function):
    """Forward all but the last product, backward all of it. The result has the shape of the MLP's and no values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        norm: Norm | None,
        projections: tuple[Projection, Projection, Projection],
        dropouts: tuple[Dropout | None, Dropout | None],
        activation: str,
        residual: bool,
        left: list[_Left],
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        flat, (gate, up, down) = _matrix(x), projections
        room = room_of(flat.shape[1], (gate, up))
        if delta is None:
            q, rstd = quantize_input(flat, norm, (gate, up), room)
        else:
            flat, (q, rstd) = quantize_sum(flat, _matrix(delta), norm, (gate, up), room)
        first = operand_of(q, (gate, up), x.dtype, dropouts[0])
        gated, upper = products_of(first, (gate, up), x.dtype)
        h, *kept = steps_of((gate,)).gated(gated, upper, activation, spare=room_of(gated.shape[1], (down,)))
        del gated, upper
        last = operand_of(h, (down,), x.dtype, dropouts[1])
        left.append(_Left(last, down, flat if residual else None))
        ctx.norm, ctx.projections, ctx.dropouts, ctx.activation = norm, projections, dropouts, activation
        ctx.shape, ctx.dtype, ctx.residual = x.shape, x.dtype, residual
        quantized = [part for value in (q, h, *kept) for part in (value.codes, value.scale)]
        quantized += [*first.kept, *last.kept]
        ctx.save_for_backward(flat if _needs_x(norm, (gate,)) else None, rstd, *quantized, *adapters)
        return x.new_empty(()).expand(*x.shape[:-1], down.weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, rstd, *rest = ctx.saved_tensors
        q, h, gate, up = (kept_input(rest[i], rest[i + 1], ctx.projections) for i in (0, 2, 4, 6))
        kept, kept_down, adapters = rest[8:11], rest[11:14], rest[14:]
        *inner, down = _with_adapters(ctx.projections, adapters)
        (dropout, dropout_down), needs, dy = ctx.dropouts, ctx.needs_input_grad[8:], _matrix(grad)
        # What is as wide as the MLP lives as briefly as it can: this is where memory peaks.
        last = _Backward([down], [dy], kept_operand(h, kept_down, dropout_down), ctx.dtype)
        of_down = last.adapter_gradients(needs[4:])
        dh, columns, room = last.input_gradient(), row_scales(inner), room_of_gradients(2 * h.shape[1], inner)
        backward = steps_of(inner).gated_backward
        dgate, dup, quantized = backward(dh, gate, up, columns, ctx.activation, spare=room, reuse=True)
        first = _Backward(inner, [dgate, dup], kept_operand(q, kept, dropout), ctx.dtype, quantized)
        del dh, dgate, dup, quantized
        dx = first.input_gradient() if any(ctx.needs_input_grad[:2]) else None
        dx = _through_norm(dx, x, q, ctx.norm, rstd, ctx.shape, dy if ctx.residual else None)
        return (
            *(dx if needed else None for needed in ctx.needs_input_grad[:2]),
            *[None] * 6,
            *first.adapter_gradients(needs[:4]),
            *of_down,
        )


class _LastProduct(torch.autograd.Function):
    """Keeps nothing for backward: checkpointing, which stops once it has what was kept, does not run it again."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, left: _Left) -> torch.Tensor:
        (y,) = products_of(left.operand, (left.down,), stand_in.dtype)
        if left.residual is not None:
            y += left.residual
        return y.reshape(stand_in.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0], None


class _Backward:
    """The gradients of projections that share an input, from those of their outputs.

    quantized: what the outputs' gradients times the rows' scales become, if that is known already.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        grads: Sequence[torch.Tensor],
        operand: Operand,
        dtype: torch.dtype,
        quantized: ScaledTensor | None = None,
    ) -> None:
        self.projections, self.grads, self.operand, self.dtype = projections, grads, operand, dtype
        self.quantized = quantized
        self.adapters = adapters_of(projections)
        self.low_gradient = grads[0].new_empty(grads[0].shape[0], rank_of(projections))  # of x A^T
        self.of_b = [
            adapter_gradients.over_output(
                grads[adapter.index],
                cast(torch.Tensor, operand.low)[:, adapter.columns],
                adapter.b,
                self.low_gradient[:, adapter.columns],
            )
            for adapter in self.adapters
        ]

    def input_gradient(self) -> torch.Tensor:
        quantized, self.quantized = self.quantized, None
        codes = [p.weight.codes for p in self.projections]
        room = room_of_gradients(sum([part.shape[0] for part in codes]), self.projections)
        if quantized is None:
            columns = row_scales(self.projections)
            quantized = steps_of(self.projections).quantize_tokens(*self.grads, columns=columns, spare=room)[0]
        if room:
            downs = self.operand.downs or downs_of(self.adapters)
            quantized = adapter_columns.append_gradients(quantized, self.low_gradient, downs)
            codes.append(downs.codes)
        if by_blocks(self.projections):
            weight = groups.transposed(codes, [p.weight.scale for p in self.projections])
            dx = groups.product(quantized, weight, self.dtype)
        else:
            dx = native.product_with_codes(quantized, fused.transposed(*codes), self.dtype)
        if self.adapters and not room:  # one pass over dx for all of them
            scaled = torch.cat([adapter.a.to(self.dtype) * adapter.scaling for adapter in self.adapters])
            if self.operand.dropout is None:
                dx.addmm_(self.low_gradient, scaled)
            else:
                add_kept(dx, self.low_gradient, scaled, self.operand.dropout)
        return dx

    def adapter_gradients(self, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(needed)
        if not self.adapters or not any(needed):
            return found
        seen = dropped_codes(self.operand.q, self.operand.dropout)
        parts = adapter_gradients.over_tokens(self.low_gradient, seen)  # one pass over x for all of them
        first = self.adapters[0].scaling or 1.0  # of all, as a rule
        together = adapter_gradients.add_parts(parts, parts.shape[2], first)
        for adapter, db in zip(self.adapters, self.of_b, strict=True):
            da = together[adapter.columns]
            if adapter.scaling != first:
                da = da * (adapter.scaling / first)
            found[2 * adapter.index] = da.to(adapter.a.dtype)
            found[2 * adapter.index + 1] = db.to(adapter.b.dtype)
        return found


def _needs_x(norm: Norm | None, projections: Sequence[Projection]) -> bool:
    return norm is not None and (not norm.from_codes or by_blocks(projections))


def _through_norm(
    dx: torch.Tensor | None,
    x: torch.Tensor | None,
    q: ScaledTensor,
    norm: Norm | None,
    rstd: torch.Tensor,
    shape: torch.Size,
    residual: torch.Tensor | None,
) -> torch.Tensor | None:
    """x: kept, or None; q: norm(x) quantized. residual: a gradient to add."""
    if dx is None:
        return None
    if norm is not None:
        dx = fused.norm_backward(dx, q if x is None else x, norm.weight.float(), rstd, residual)
    elif residual is not None:
        dx += residual
    return dx.reshape(shape)


def _with_adapters(projections: Sequence[Projection], adapters: Sequence[torch.Tensor | None]) -> list[Projection]:
    """The projections with the adapters that autograd kept, which it checks for changes in place."""
    pairs = zip(adapters[::2], adapters[1::2], strict=True)
    return [replace(p, a=a, b=b) for p, (a, b) in zip(projections, pairs, strict=True)]


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
