"""Linears of one input as one product: their weights below each other, in memory that the layers themselves share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from octavo.base.errors import UnsupportedError
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.linear import apply


class PackedLinears:
    """x [M, K] -> the results of `layers` beside each other, [M, sum of N].

    layers: all nn.Linear, or all FrozenFloat8Linear with the same rule. The layers stay usable: their weights become
    views of the packed ones, so nothing is kept twice. Moving them to another device or dtype ends that.
    UnsupportedError: other layers, or FP8 ones that cannot be one product.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        kinds = {type(layer) for layer in layers}
        if kinds not in ({nn.Linear}, {FrozenFloat8Linear}):
            got = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UnsupportedError("one product of several layers", got=got, need="nn.Linear or FrozenFloat8Linear")
        self.bias = _packed_bias(layers)
        self.frozen: FrozenFloat8Linear | None = None
        if kinds == {nn.Linear}:
            self.weight = _shared([cast(nn.Parameter, layer.weight) for layer in layers])
            return
        frozen = [cast(FrozenFloat8Linear, layer) for layer in layers]
        self.frozen, self.input_scale = frozen[0], _one_input_scale(frozen)
        granularity = frozen[0].rule.granularity
        if any((layer.rule, layer.activation) != (frozen[0].rule, frozen[0].activation) for layer in frozen):
            raise UnsupportedError("one product of several FP8 layers", got="different schemes", need="one scheme")
        if isinstance(granularity, PerBlock) and any(layer.out_features % granularity.rows for layer in frozen[:-1]):
            raise UnsupportedError("one product of several FP8 layers", got="blocks across two of them")
        self.weight = _shared([cast(nn.Parameter, layer.weight) for layer in frozen])
        if isinstance(granularity, PerTensor) and len(frozen) > 1:
            rows = [layer.weight_scale.reshape(1, 1).expand(layer.out_features, 1) for layer in frozen]
            self.scale, self.tile = torch.cat(rows).detach(), PerRow().tile
        else:
            self.scale, self.tile = _shared([layer.weight_scale for layer in frozen]), granularity.tile
            if isinstance(granularity, PerTensor):
                self.scale = self.scale.reshape(())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.frozen is None:
            return F.linear(x, self.weight, self.bias)
        spec, activation = self.frozen.rule.spec.name, self.frozen.activation
        return apply(x, self.weight, self.scale, self.bias, self.input_scale, spec, self.tile, activation, "auto")


def _shared(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The parameters below each other, of which they become views."""
    first, rows = parameters[0].detach(), sum(len(parameter) for parameter in parameters)
    ends = list(accumulate(parameter.numel() for parameter in parameters))
    offsets = [first.storage_offset() + end for end in (0, *ends[:-1])]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) == 1 and [parameter.storage_offset() for parameter in parameters] == offsets:  # packed before
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    packed = torch.cat([parameter.detach() for parameter in parameters])
    begin = 0
    for parameter in parameters:
        parameter.data = packed[begin : begin + len(parameter)]
        begin += len(parameter)
    return packed


def _packed_bias(layers: Sequence[nn.Module]) -> torch.Tensor | None:
    biases = [cast("torch.Tensor | None", getattr(layer, "bias", None)) for layer in layers]
    if all(bias is None for bias in biases):
        return None
    found = []
    for layer, bias in zip(layers, biases, strict=True):
        weight = cast(nn.Linear, layer).weight
        dtype = next(b.dtype for b in biases if b is not None)
        found.append(bias.detach() if bias is not None else torch.zeros(len(weight), dtype=dtype, device=weight.device))
    return torch.cat(found)


def _one_input_scale(layers: Sequence[FrozenFloat8Linear]) -> torch.Tensor | None:
    """Static activations: the layers share their input, so one scale, the largest, covers it."""
    scales = [layer.input_scale.detach() for layer in layers if layer.input_scale is not None]
    return torch.stack(scales).amax(0).reshape(()) if scales else None
