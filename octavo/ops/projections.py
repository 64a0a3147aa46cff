"""Projections of one input as FP8 products: what octavo.ops.lora goes forward with, and needs on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.scaled import ScaledTensor
from octavo.ops import adapter_columns, fused, groups, native
from octavo.ops.dropout import Dropout, draw, dropped_codes

_PER_TOKEN = PerRow()
_Input = tuple[ScaledTensor, torch.Tensor | None]  # quantized; the inverse of the norm's root mean square


@dataclass(frozen=True)
class Projection:
    """y = x W^T + bias + scaling * (d(x) A^T) B^T. Without a and b: the frozen layer alone.

    dropout: the rate of d, a multiple of 2**-16 below 1, the same for all adapters of one input.
    """

    weight: ScaledTensor
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scaling: float = 1.0
    dropout: float = 0.0

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


@dataclass(frozen=True)
class Operand:
    """A quantized input of projections, as their products read it.

    low: scaling * d(x) A^T [M, R] of all adapters beside each other. downs: their A, where low is in columns of q.
    dropout: d.
    """

    q: ScaledTensor
    low: torch.Tensor | None
    downs: adapter_columns.Downs | None
    dropout: Dropout | None = None

    @property
    def kept(self) -> tuple[torch.Tensor | None, ...]:
        """What the way back needs besides q; with dropout it does without the codes of A."""
        downs = self.downs if self.dropout is None else None
        return self.low, *((downs.codes, downs.unit) if downs else (None, None))


@dataclass(frozen=True)
class Adapter:
    """The adapter of projection `index`; its rank takes `columns` of what belongs to all adapters of a group.

    scaling: what makes up for the dropped inputs included.
    """

    index: int
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    columns: slice


def adapters_of(projections: Sequence[Projection]) -> list[Adapter]:
    found: list[Adapter] = []
    begin = 0
    for index, p in enumerate(projections):
        if p.a is not None and p.b is not None:
            scaling = p.scaling / (1 - p.dropout)
            found.append(Adapter(index, p.a, p.b, scaling, slice(begin, begin + p.a.shape[0])))
            begin += p.a.shape[0]
    return found


def rank_of(projections: Sequence[Projection]) -> int:
    return sum([p.a.shape[0] for p in projections if p.a is not None])


def dropout_of(projections: Sequence[Projection]) -> Dropout | None:
    """The next one of their adapters."""
    rates = {p.dropout for p in projections if p.a is not None}
    if len(rates) > 1:
        raise ValueError(f"adapters of one input share what is dropped; got rates {sorted(rates)}")
    return draw(rates.pop()) if rates else None


def room_of(k: int, projections: Sequence[Projection]) -> int:
    """The columns that a product over k is given for the adapters."""
    rank = rank_of(projections)
    return adapter_columns.room_for(k, rank, projections[0].weight) if rank else 0


def room_of_gradients(n: int, projections: Sequence[Projection]) -> int:
    """`room_of` the product that gives dX; none with dropout, which takes of dX what is the adapters' alone."""
    return 0 if any(p.dropout for p in projections if p.a is not None) else room_of(n, projections)


def downs_of(adapters: Sequence[Adapter]) -> adapter_columns.Downs:
    return adapter_columns.encode_downs([adapter.a for adapter in adapters], [adapter.scaling for adapter in adapters])


def kept_operand(q: ScaledTensor, kept: Sequence[torch.Tensor | None], dropout: Dropout | None) -> Operand:
    """From `Operand.kept`."""
    low, codes, unit = kept
    downs = adapter_columns.Downs(codes, unit) if codes is not None and unit is not None else None
    return Operand(q, low, downs, dropout)


def operand_of(
    q: ScaledTensor, projections: Sequence[Projection], dtype: torch.dtype, dropout: Dropout | None
) -> Operand:
    """q has `room_of` behind its rows."""
    adapters = adapters_of(projections)
    seen = dropped_codes(q, dropout)
    if room_of(q.shape[1], projections):
        downs = downs_of(adapters)
        return Operand(*adapter_columns.append_products(q, downs, dtype, seen), downs, dropout)
    if not adapters:
        return Operand(q, None, None)
    parts = fused.low_rank(seen, [adapter.a for adapter in adapters], dtype)
    low = torch.cat([part * adapter.scaling for part, adapter in zip(parts, adapters, strict=True)], dim=1)
    return Operand(q, low, None, dropout)


def products_of(operand: Operand, projections: Sequence[Projection], dtype: torch.dtype) -> list[torch.Tensor]:
    adapters, weights = adapters_of(projections), [p.weight for p in projections]
    if operand.downs is not None:
        for adapter in adapters:
            w = weights[adapter.index]
            weights[adapter.index] = adapter_columns.extended(w, adapter.b, adapter.columns.start, operand.downs)
    product = groups.product if by_blocks(projections) else native.scaled_mm
    outputs = [product(_narrow(operand.q, w), w, dtype) for w in weights]
    for y, p in zip(outputs, projections, strict=True):
        if p.bias is not None:
            y += p.bias.to(dtype)
    if operand.low is not None and operand.downs is None:
        for adapter in adapters:
            outputs[adapter.index].addmm_(operand.low[:, adapter.columns], adapter.b.to(dtype).mT)
    return outputs


def _narrow(q: ScaledTensor, w: ScaledTensor) -> ScaledTensor:
    """q without the columns that a weight without an adapter lacks."""
    if q.shape[1] == w.shape[1]:
        return q
    codes = q.codes[:, : w.shape[1]]
    return ScaledTensor(codes, q.scale[:, : q.granularity.scale_shape(codes.shape)[1]], q.spec, q.granularity)


def by_blocks(projections: Sequence[Projection]) -> bool:
    return isinstance(projections[0].weight.granularity, PerBlock)


def steps_of(projections: Sequence[Projection]) -> Any:
    """The functions that quantize as the weights need it: a module, octavo.ops.groups or octavo.ops.fused."""
    return groups if by_blocks(projections) else fused


def kept_input(codes: torch.Tensor, scale: torch.Tensor, projections: Sequence[Projection]) -> ScaledTensor:
    granularity = groups.GROUP if by_blocks(projections) else _PER_TOKEN
    return ScaledTensor(codes, scale, projections[0].weight.spec, granularity)


def quantize_input(x: torch.Tensor, norm: Norm | None, projections: Sequence[Projection], room: int) -> _Input:
    quantize = steps_of(projections).quantize_tokens
    if norm is None:
        return cast(_Input, quantize(x, spare=room))
    return cast(_Input, quantize(x, columns=norm.weight.float(), epsilon=norm.epsilon, spare=room))


def quantize_sum(
    x: torch.Tensor, delta: torch.Tensor, norm: Norm | None, projections: Sequence[Projection], room: int
) -> tuple[torch.Tensor, _Input]:
    """x + delta, and `quantize_input` of it: in one pass where scales are per token and there is a norm."""
    if norm is None or by_blocks(projections):
        total = x + delta
        return total, quantize_input(total, norm, projections, room)
    total, weight = torch.empty_like(x), norm.weight.float()
    q = fused.quantize_tokens(x, columns=weight, epsilon=norm.epsilon, spare=room, delta=delta, total=total)
    return total, q


def row_scales(projections: Sequence[Projection]) -> torch.Tensor | None:
    """The scales of the rows of all weights, one after the other, float32; None where they have no such."""
    if by_blocks(projections):
        return None
    scales = [p.weight.per_row().scale.flatten() for p in projections]
    return torch.cat(scales) if len(scales) > 1 else scales[0]
