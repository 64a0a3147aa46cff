"""Whether rounding the inputs of a model's FP8 linears pays: where that makes them FP8 products both ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from octavo.base.hardware import caps_of
from octavo.base.log import logger
from octavo.formats.granularity import Granularity, PerBlock, PerRow
from octavo.formats.scale import is_power_of_two
from octavo.integrations.fused import projection_of
from octavo.integrations.layers import Layout, decoder, layers_of
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.backends import BACKENDS, Problem

BLOCK = PerBlock(128, 128)
ENOUGH = 0.5  # of the FP8 linears, below which rounding inputs costs quality for little speed


@dataclass(frozen=True)
class Chosen:
    """activation: `token`, `group128` or `none`. reason: in words, for a log and a report."""

    activation: str
    reason: str


def choose_activation(model: nn.Module, given: Chosen | None = None) -> Chosen:
    """What the FP8 linears of a PeftModel best do to their inputs while it trains; set on them.

    `token`, over scales in 128 x 128 blocks `group128`, where at least half of them then run fused, else `none`. Scales
    in blocks that are powers of two become scales per row where that gives `token`: faster products. Experts count as
    three linears each. given: what has been decided before.
    """
    modules = [m for m in model.modules() if isinstance(m, FrozenFloat8Linear | FrozenFloat8Experts)]
    linears = [m for m in modules if isinstance(m, FrozenFloat8Linear)]
    if given is None or given.activation == "token":
        _blocks_to_rows(linears)
    if given is not None or not linears:
        return _set(modules, given or Chosen("none", "no linear in FP8"))
    blocks = sum(m.rule.granularity == BLOCK for m in linears)
    mode = "group128" if 2 * blocks > len(linears) else "token"
    _set(modules, Chosen(mode, "a trial"))
    found = survey(decoder(model))
    if found.fused >= ENOUGH * found.total:
        return Chosen(mode, found.share)
    return _set(modules, Chosen("none", found.reason))


@dataclass(frozen=True)
class Survey:
    """FP8 linears of a decoder, experts as three each; how many train fused; the commonest reason of the others."""

    fused: int
    total: int
    reason: str

    @property
    def share(self) -> str:
        return f"{self.fused} of {self.total} FP8 linears multiply in FP8, forward and backward"

    def __str__(self) -> str:
        rest = f"; the others run one by one: {self.reason}" if self.reason else ""
        return f"training: {self.share}{rest}" if self.fused else f"training layer by layer: {self.reason}"


def survey(layers: nn.Module) -> Survey:
    """What the linears of a decoder would do in a step of training, as they are now, with their adapters or none."""
    modules = list(layers.modules())
    linears = sum(isinstance(module, FrozenFloat8Linear) for module in modules)
    total = linears + sum(3 * module.num_experts for module in modules if isinstance(module, FrozenFloat8Experts))
    layout = Layout.of(layers)
    groups = [group for layer in layers_of(layers) for group in layout.groups(layer)] if layout else []
    found = [why_not(linear) for group in groups for linear in group]
    fused = found.count(None)
    if fused == total:
        return Survey(fused, total, "" if total else "no linear in FP8")
    if fused and total > linears:
        return Survey(fused, total, "experts run one by one")
    counts = Counter(reason for reason in found if reason)
    kind = getattr(getattr(layers, "config", None), "model_type", type(layers).__name__)
    reason = counts.most_common(1)[0][0] if counts else f"decoder '{kind}' runs layer by layer"
    return Survey(fused, total, reason)


def _blocks_to_rows(linears: Sequence[FrozenFloat8Linear]) -> None:
    """All of them or none: layers that share an input are of one kind."""
    blocks = [m for m in linears if m.rule.granularity == BLOCK]
    if not blocks or any(_refused(m, "linear", PerRow(), "token") for m in blocks):
        return
    if all(bool(is_power_of_two(m.weight_scale).all()) for m in blocks):
        changed, total = sum(m.to_rows() for m in blocks), sum(m.weight.numel() for m in blocks)
        logger().info("block scales as row scales: %d of %d codes lost bits to a subnormal", changed, total)


def _refused(base: FrozenFloat8Linear, op: str, granularity: Granularity, activation: str) -> str | None:
    (n, k), device = base.weight.shape, base.weight.device
    problem = Problem(op, device.type, tile=granularity.tile, activation=activation, m=4, n=n, k=k)
    return BACKENDS["native"].refuse(problem, caps_of(device))


def _set(modules: Sequence[FrozenFloat8Linear | FrozenFloat8Experts], chosen: Chosen) -> Chosen:
    for module in modules:
        module.activation = chosen.activation
    return chosen


def why_not(layer: nn.Module) -> str | None:
    """The reason why a linear of a known decoder is not fused, or None."""
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    if isinstance(layer, BaseTunerLayer) and base is layer:
        return f"adapters of PEFT's {type(layer).__module__.split('.')[2]}"
    if not isinstance(base, FrozenFloat8Linear):
        return "linears in 16 bit"
    granularity = base.rule.granularity
    ops = ("linear",) if isinstance(granularity, PerBlock) else ("linear", "linear_dx")  # blocks take another way back
    for op in ops:
        refused = _refused(base, op, granularity, base.activation)
        if refused:
            return refused
    if base.compute_dtype != torch.bfloat16:
        return f"a model in {base.compute_dtype}, not bfloat16"
    if isinstance(layer, LoraLinear) and any(getattr(d, "p", 0.0) > 0 for d in layer.lora_dropout.values()):
        return "dropout on the inputs of adapters"
    if isinstance(layer, LoraLinear) and len(layer.active_adapters) > 1:
        return "several adapters at once"
    return None if projection_of(layer) is not None else f"adapters or hooks of {type(layer).__name__}"
