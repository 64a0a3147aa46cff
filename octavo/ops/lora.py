"""LoRA over frozen FP8 weights with FP8 products both ways: autograd functions that decide what is kept for backward.

A group of projections that read the same input quantizes it once, keeps the codes (never a 16-bit copy) and gets its
dX as one product over the outputs of all: scales of W's rows, which lie on the contracted dimension, are folded into
the quantization of dY, and what is left of W is its bytes, transposed. Adapters multiply in the dtype of x from
masters of any dtype; forward and backward see the same dequantized input. An RMSNorm before the group is part of it:
its output is never written. The adapters' second products are columns of the FP8 products (octavo.ops.adapter_columns).

Weights are E4M3 per row or tensor with inputs quantized per token, or per 128 x 128 block with inputs per group of 128;
one kind in a group. Shapes: x [..., K], W [N, K], A [r, K], B [N, r].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.scaled import ScaledTensor
from octavo.ops import adapter_columns, fused, groups, native

_PER_TOKEN = PerRow()
_Input = tuple[ScaledTensor, torch.Tensor | None]  # quantized; the inverse of the norm's root mean square


@dataclass(frozen=True)
class Projection:
    """y = x W^T + bias + scaling * (x A^T) B^T. Without a and b: the frozen layer alone."""

    weight: ScaledTensor
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scaling: float = 1.0

    @property
    def adapter(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.a, self.b


@dataclass(frozen=True)
class Norm:
    """RMSNorm with a frozen weight [K]: x * rstd(x) * weight.

    from_codes: its gradient takes the codes of its output, which are kept anyway, and x is not kept: only where
    `fused.codes_suffice(weight)`.
    """

    weight: torch.Tensor
    epsilon: float
    from_codes: bool = False


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
    settings = norm, tuple(projections), x_stays, pass_on
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
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) with x or norm(x) -> [..., K], plus x where it is a residual.

    gate(x) and up(x) are kept as codes per token.
    """
    adapters = [part for projection in (gate, up, down) for part in projection.adapter]
    settings = norm, (gate, up, down), activation, residual
    y: torch.Tensor = _GatedMlp.apply(x, *settings, *adapters)  # type: ignore[no-untyped-call]
    return y


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm: Norm | None,
        projections: tuple[Projection, ...],
        x_stays: bool,
        pass_on: bool,
        *adapters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        flat = _matrix(x)
        q, rstd = _quantize_input(flat, norm, projections, _room(flat.shape[1], projections))
        outputs, low = _outputs(q, projections, x.dtype)
        ctx.norm, ctx.projections, ctx.shape, ctx.dtype = norm, projections, x.shape, x.dtype
        kept = (None, None) if x_stays else (q.codes, q.scale)
        x_kept = flat if x_stays or _needs_x(norm, projections) else None
        ctx.save_for_backward(x_kept, rstd, *kept, low, *adapters)
        results = tuple(y.reshape(*x.shape[:-1], y.shape[1]) for y in outputs)
        return (*results, x.view_as(x)) if pass_on else results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, rstd, codes, scale, low, *adapters = ctx.saved_tensors
        projections = _with_adapters(ctx.projections, adapters)
        flat = [_matrix(grad) for grad in grads]
        residual = flat.pop() if len(flat) > len(projections) else None
        if codes is None:
            q = _quantize_input(x, ctx.norm, projections, 0)[0]
        else:
            q = _quantized(codes, scale, projections)
        steps = _Backward(projections, flat, q, low, ctx.dtype)
        dx = steps.input_gradient() if ctx.needs_input_grad[0] else None
        dx = _through_norm(dx, x, q, ctx.norm, rstd, ctx.shape, residual)
        return dx, None, None, None, None, *steps.adapter_gradients(ctx.needs_input_grad[5:])


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm: Norm | None,
        projections: tuple[Projection, Projection, Projection],
        activation: str,
        residual: bool,
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        flat, (gate, up, down) = _matrix(x), projections
        q, rstd = _quantize_input(flat, norm, (gate, up), _room(flat.shape[1], (gate, up)))
        (gated, upper), low = _outputs(q, (gate, up), x.dtype)
        h, *kept = _steps((gate,)).gated(gated, upper, activation, spare=_room(gated.shape[1], (down,)))
        del gated, upper
        (y,), low_down = _outputs(h, (down,), x.dtype)
        if residual:
            y += flat
        ctx.norm, ctx.projections, ctx.activation = norm, projections, activation
        ctx.shape, ctx.dtype, ctx.residual = x.shape, x.dtype, residual
        quantized = [part for value in (q, h, *kept) for part in (value.codes, value.scale)]
        ctx.save_for_backward(flat if _needs_x(norm, (gate,)) else None, rstd, *quantized, low, low_down, *adapters)
        return y.reshape(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, rstd, *rest = ctx.saved_tensors
        q, h, gate, up = (_quantized(rest[i], rest[i + 1], ctx.projections) for i in (0, 2, 4, 6))
        low, low_down, *adapters = rest[8:]
        *inner, down = _with_adapters(ctx.projections, adapters)
        needs, dy = ctx.needs_input_grad[5:], _matrix(grad)
        # What is as wide as the MLP lives as briefly as it can: this is where memory peaks.
        last = _Backward([down], [dy], h, low_down, ctx.dtype)
        of_down = last.adapter_gradients(needs[4:])
        dh, columns, room = last.input_gradient(), _row_scales(inner), _room(2 * h.shape[1], inner)
        backward = _steps(inner).gated_backward
        dgate, dup, quantized = backward(dh, gate, up, columns, ctx.activation, spare=room, reuse=True)
        first = _Backward(inner, [dgate, dup], q, low, ctx.dtype, quantized)
        del dh, dgate, dup, quantized
        dx = first.input_gradient() if ctx.needs_input_grad[0] else None
        dx = _through_norm(dx, x, q, ctx.norm, rstd, ctx.shape, dy if ctx.residual else None)
        return (dx, *[None] * 4, *first.adapter_gradients(needs[:4]), *of_down)


class _Backward:
    """The gradients of projections that share an input, from those of their outputs.

    quantized: what the outputs' gradients times the rows' scales become, if that is known already.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        grads: Sequence[torch.Tensor],
        q: ScaledTensor,
        low: torch.Tensor | None,
        dtype: torch.dtype,
        quantized: ScaledTensor | None = None,
    ) -> None:
        self.projections, self.grads, self.q, self.dtype = projections, grads, q, dtype
        self.quantized = quantized
        self.adapters = _adapters(projections)
        self.low_gradient = grads[0].new_empty(len(grads[0]), _rank(projections))  # of x A^T
        self.of_b: list[torch.Tensor] = []
        for adapter in self.adapters:
            dy = grads[adapter.index]
            torch.mm(dy, adapter.b.to(dtype), out=self.low_gradient[:, adapter.columns])
            self.of_b.append(dy.mT @ cast(torch.Tensor, low)[:, adapter.columns])

    def input_gradient(self) -> torch.Tensor:
        quantized, self.quantized = self.quantized, None
        codes = [p.weight.codes for p in self.projections]
        room = _room(sum(len(part) for part in codes), self.projections)
        if quantized is None:
            columns = _row_scales(self.projections)
            quantized = _steps(self.projections).quantize_tokens(*self.grads, columns=columns, spare=room)[0]
        if room:
            downs = _downs(self.adapters)
            quantized = adapter_columns.append_gradients(quantized, self.low_gradient, downs)
            codes.append(downs.codes)
        if _by_blocks(self.projections):
            weight = groups.transposed(codes, [p.weight.scale for p in self.projections])
            return groups.product(quantized, weight, self.dtype)
        dx = native.product_with_codes(quantized, fused.transposed(*codes), self.dtype)
        if self.adapters and not room:  # one pass over dx for all of them
            scaled = [adapter.a.to(self.dtype) * adapter.scaling for adapter in self.adapters]
            dx.addmm_(self.low_gradient, torch.cat(scaled))
        return dx

    def adapter_gradients(self, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(needed)
        if not self.adapters or not any(needed):
            return found
        together = adapter_columns.sums_over_tokens(self.low_gradient, self.q)  # one pass over x for all of them
        for adapter, db in zip(self.adapters, self.of_b, strict=True):
            found[2 * adapter.index] = (together[adapter.columns] * adapter.scaling).to(adapter.a.dtype)
            found[2 * adapter.index + 1] = db.to(adapter.b.dtype)
        return found


@dataclass(frozen=True)
class _Adapter:
    """The adapter of projection `index`; its rank takes `columns` of what belongs to all adapters of a group."""

    index: int
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    columns: slice


def _adapters(projections: Sequence[Projection]) -> list[_Adapter]:
    found: list[_Adapter] = []
    begin = 0
    for index, p in enumerate(projections):
        if p.a is not None and p.b is not None:
            found.append(_Adapter(index, p.a, p.b, p.scaling, slice(begin, begin + len(p.a))))
            begin += len(p.a)
    return found


def _rank(projections: Sequence[Projection]) -> int:
    return sum(len(p.a) for p in projections if p.a is not None)


def _room(k: int, projections: Sequence[Projection]) -> int:
    """The columns that a product over k is given for the adapters."""
    rank = _rank(projections)
    return adapter_columns.room_for(k, rank, projections[0].weight) if rank else 0


def _downs(adapters: Sequence[_Adapter]) -> adapter_columns.Downs:
    return adapter_columns.encode_downs([adapter.a for adapter in adapters], [adapter.scaling for adapter in adapters])


def _outputs(
    q: ScaledTensor, projections: Sequence[Projection], dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """y [M, N_i], and scaling * x A^T [M, R] of all adapters beside each other. q has `_room` behind its rows."""
    adapters = _adapters(projections)
    room = _room(q.shape[1], projections)
    weights = [p.weight for p in projections]
    low = None
    if room:
        downs = _downs(adapters)
        q, low = adapter_columns.append_products(q, downs, dtype)
        for adapter in adapters:
            w = weights[adapter.index]
            weights[adapter.index] = adapter_columns.extended(w, adapter.b, adapter.columns.start, downs)
    elif adapters:
        parts = fused.low_rank(q, [adapter.a for adapter in adapters], dtype)
        low = torch.cat([part * adapter.scaling for part, adapter in zip(parts, adapters, strict=True)], dim=1)
    product = groups.product if _by_blocks(projections) else native.scaled_mm
    outputs = [product(_narrow(q, w), w, dtype) for w in weights]
    for y, p in zip(outputs, projections, strict=True):
        if p.bias is not None:
            y += p.bias.to(dtype)
    if low is not None and not room:
        for adapter in adapters:
            outputs[adapter.index].addmm_(low[:, adapter.columns], adapter.b.to(dtype).mT)
    return outputs, low


def _narrow(q: ScaledTensor, w: ScaledTensor) -> ScaledTensor:
    """q without the columns that a weight without an adapter lacks."""
    codes = q.codes[:, : w.shape[1]]
    return ScaledTensor(codes, q.scale[:, : q.granularity.scale_shape(tuple(codes.shape))[1]], q.spec, q.granularity)


def _by_blocks(projections: Sequence[Projection]) -> bool:
    return isinstance(projections[0].weight.granularity, PerBlock)


def _steps(projections: Sequence[Projection]) -> Any:
    """The functions that quantize as the weights need it: a module, octavo.ops.groups or octavo.ops.fused."""
    return groups if _by_blocks(projections) else fused


def _quantized(codes: torch.Tensor, scale: torch.Tensor, projections: Sequence[Projection]) -> ScaledTensor:
    granularity = groups.GROUP if _by_blocks(projections) else _PER_TOKEN
    return ScaledTensor(codes, scale, projections[0].weight.spec, granularity)


def _quantize_input(x: torch.Tensor, norm: Norm | None, projections: Sequence[Projection], room: int) -> _Input:
    quantize = _steps(projections).quantize_tokens
    if norm is None:
        return cast(_Input, quantize(x, spare=room))
    return cast(_Input, quantize(x, columns=norm.weight.float(), epsilon=norm.epsilon, spare=room))


def _needs_x(norm: Norm | None, projections: Sequence[Projection]) -> bool:
    return norm is not None and (not norm.from_codes or _by_blocks(projections))


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


def _row_scales(projections: Sequence[Projection]) -> torch.Tensor | None:
    """The scales of the rows of all weights, one after the other, float32; None where they have no such."""
    return None if _by_blocks(projections) else torch.cat([p.weight.per_row().scale.flatten() for p in projections])


def _with_adapters(projections: Sequence[Projection], adapters: Sequence[torch.Tensor | None]) -> list[Projection]:
    """The projections with the adapters that autograd kept, which it checks for changes in place."""
    pairs = zip(adapters[::2], adapters[1::2], strict=True)
    return [Projection(p.weight, p.bias, a, b, p.scaling) for p, (a, b) in zip(projections, pairs, strict=True)]


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
