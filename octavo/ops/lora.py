"""LoRA over frozen FP8 weights with FP8 products both ways: autograd functions that decide what is kept for backward.

A group of projections that read the same input quantizes it once, keeps the codes (never a 16-bit copy) and gets its
dX as one product over the outputs of all: scales of W's rows, which lie on the contracted dimension, are folded into
the quantization of dY, and what is left of W is its bytes, transposed. Adapters multiply in the dtype of x from
masters of any dtype; forward and backward see the same dequantized input. An RMSNorm before the group is part of it:
its output is never written.

Weights are E4M3 per row or tensor, inputs are quantized per token. Shapes: x [..., K], W [N, K], A [r, K], B [N, r].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.formats.granularity import PerRow
from octavo.formats.scaled import ScaledTensor
from octavo.ops import fused, native

_PER_TOKEN = PerRow()


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
    """RMSNorm with a frozen weight [K]: x * rstd(x) * weight."""

    weight: torch.Tensor
    epsilon: float


def project(x: torch.Tensor, projections: Sequence[Projection], norm: Norm | None = None) -> tuple[torch.Tensor, ...]:
    """The outputs [..., N_i] of projections that read the same x, or norm(x). Up to three; dtype of x, 16 bit.

    Gradients go to x, A and B; never to W, bias or the norm.
    """
    adapters = [part for projection in projections for part in projection.adapter]
    outputs: tuple[torch.Tensor, ...] = _Project.apply(x, norm, tuple(projections), *adapters)  # type: ignore[no-untyped-call]
    return outputs


def gated_mlp(
    x: torch.Tensor, gate: Projection, up: Projection, down: Projection, activation: str, norm: Norm | None = None
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) with x or norm(x) -> [..., K]. gate(x) and up(x) are kept as codes per token."""
    adapters = [part for projection in (gate, up, down) for part in projection.adapter]
    y: torch.Tensor = _GatedMlp.apply(x, norm, gate, up, down, activation, *adapters)  # type: ignore[no-untyped-call]
    return y


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm: Norm | None, projections: tuple[Projection, ...], *adapters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        flat = _matrix(x)
        q, rstd = _quantize_input(flat, norm)
        outputs, lows = _outputs(q, projections, x.dtype)
        ctx.norm, ctx.projections, ctx.shape, ctx.dtype = norm, projections, x.shape, x.dtype
        ctx.save_for_backward(flat if norm else None, rstd, q.codes, q.scale, *lows, *adapters)
        return tuple(y.reshape(*x.shape[:-1], y.shape[1]) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, rstd, codes, scale, *rest = ctx.saved_tensors
        count = len(ctx.projections)
        projections = _with_adapters(ctx.projections, rest[count:])
        flat = [_matrix(grad) for grad in grads]
        q = ScaledTensor(codes, scale, ctx.projections[0].weight.spec, _PER_TOKEN)
        steps = _Backward(projections, flat, q, rest[:count], ctx.dtype)
        dx = steps.input_gradient() if ctx.needs_input_grad[0] else None
        dx = _through_norm(dx, x, ctx.norm, rstd, ctx.shape)
        return dx, None, None, *steps.adapter_gradients(ctx.needs_input_grad[3:])


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm: Norm | None,
        gate: Projection,
        up: Projection,
        down: Projection,
        activation: str,
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        flat = _matrix(x)
        q, rstd = _quantize_input(flat, norm)
        (gated, upper), lows = _outputs(q, (gate, up), x.dtype)
        h, *kept = fused.gated(gated, upper, activation)
        del gated, upper
        (y,), low = _outputs(h, (down,), x.dtype)
        ctx.norm, ctx.projections, ctx.activation = norm, (gate, up, down), activation
        ctx.shape, ctx.dtype = x.shape, x.dtype
        quantized = [part for value in (q, h, *kept) for part in (value.codes, value.scale)]
        ctx.save_for_backward(flat if norm else None, rstd, *quantized, *lows, *low, *adapters)
        return y.reshape(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, rstd, *rest = ctx.saved_tensors
        spec = ctx.projections[0].weight.spec
        q, h, gate, up = (ScaledTensor(rest[i], rest[i + 1], spec, _PER_TOKEN) for i in (0, 2, 4, 6))
        lows, adapters = rest[8:11], rest[11:]
        *inner, down = _with_adapters(ctx.projections, adapters)
        last = _Backward([down], [_matrix(grad)], h, lows[2:], ctx.dtype)
        dh = last.input_gradient()
        dgate, dup, quantized = fused.gated_backward(dh, gate, up, _row_scales(inner), ctx.activation)
        del dh
        first = _Backward(inner, [dgate, dup], q, lows[:2], ctx.dtype, quantized)
        dx = first.input_gradient() if ctx.needs_input_grad[0] else None
        dx = _through_norm(dx, x, ctx.norm, rstd, ctx.shape)
        needs = ctx.needs_input_grad[6:]
        return (
            dx,
            *[None] * 5,
            *first.adapter_gradients(needs[:4]),
            *last.adapter_gradients(needs[4:]),
        )


class _Backward:
    """The gradients of projections that share an input, from those of their outputs.

    quantized: what the outputs' gradients times the rows' scales become, if that is known already.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        grads: Sequence[torch.Tensor],
        q: ScaledTensor,
        lows: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        quantized: ScaledTensor | None = None,
    ) -> None:
        self.projections, self.grads, self.q, self.lows, self.dtype = projections, grads, q, lows, dtype
        self.quantized = quantized
        parts = [
            (grad @ p.b.to(dtype)).mul_(p.scaling)
            for grad, p in zip(grads, projections, strict=True)
            if p.b is not None
        ]
        self.low_gradients = torch.cat(parts, dim=1) if parts else grads[0].new_empty(len(grads[0]), 0)

    def input_gradient(self) -> torch.Tensor:
        quantized = self.quantized
        if quantized is None:
            quantized = fused.quantize_tokens(*self.grads, columns=_row_scales(self.projections))[0]
        codes = fused.transposed(*(p.weight.codes for p in self.projections))
        dx = native.product_with_codes(quantized, codes, self.dtype)
        downs = [p.a.to(self.dtype) for p in self.projections if p.a is not None]
        if downs:  # one pass over dx for all of them
            dx.addmm_(self.low_gradients, torch.cat(downs))
        return dx

    def adapter_gradients(self, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(needed)
        if not any(needed):
            return found
        together = self.low_gradients.mT @ fused.dequantize(self.q, self.dtype)  # one pass over x for all of them
        begin = 0
        for i, (p, grad, low) in enumerate(zip(self.projections, self.grads, self.lows, strict=True)):
            if p.a is not None and p.b is not None and low is not None:
                found[2 * i] = together[begin : begin + p.a.shape[0]].to(p.a.dtype)
                found[2 * i + 1] = (grad.mT @ low).mul_(p.scaling).to(p.b.dtype)
                begin += p.a.shape[0]
        return found


def _outputs(
    q: ScaledTensor, projections: Sequence[Projection], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """y [M, N_i], and x A^T [M, r_i] where there is an adapter."""
    outputs: list[torch.Tensor] = []
    lows: list[torch.Tensor | None] = []
    downs = [p.a for p in projections if p.a is not None]
    found = iter(fused.low_rank(q, downs, dtype) if downs else [])
    for p in projections:
        y = native.scaled_mm(q, p.weight, dtype)
        if p.bias is not None:
            y += p.bias.to(dtype)
        low = None
        if p.a is not None and p.b is not None:
            low = next(found)
            y.addmm_(low, p.b.to(dtype).mT, alpha=p.scaling)
        outputs.append(y)
        lows.append(low)
    return outputs, lows


def _quantize_input(x: torch.Tensor, norm: Norm | None) -> tuple[ScaledTensor, torch.Tensor | None]:
    if norm is None:
        return fused.quantize_tokens(x)
    return fused.quantize_tokens(x, columns=norm.weight.float(), epsilon=norm.epsilon)


def _through_norm(
    dx: torch.Tensor | None, x: torch.Tensor, norm: Norm | None, rstd: torch.Tensor, shape: torch.Size
) -> torch.Tensor | None:
    if dx is None:
        return None
    return (fused.norm_backward(dx, x, norm.weight.float(), rstd) if norm else dx).reshape(shape)


def _row_scales(projections: Sequence[Projection]) -> torch.Tensor:
    """The scales of the rows of all weights, one after the other, float32."""
    return torch.cat([p.weight.per_row().scale.flatten() for p in projections])


def _with_adapters(projections: Sequence[Projection], adapters: Sequence[torch.Tensor | None]) -> list[Projection]:
    """The projections with the adapters that autograd kept, which it checks for changes in place."""
    pairs = zip(adapters[::2], adapters[1::2], strict=True)
    return [Projection(p.weight, p.bias, a, b, p.scaling) for p, (a, b) in zip(projections, pairs, strict=True)]


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
