"""Whether rounding the inputs of a model's FP8 linears pays: where that makes them FP8 products both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from octavo.base.hardware import caps_of
from octavo.base.log import logger
from octavo.formats.granularity import Granularity, PerBlock, PerRow
from octavo.formats.scale import is_power_of_two
from octavo.integrations.fused import FUSED, projection_of
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
    fused, reasons = 0, dict[str, int]()
    for layer in grouped_layers(model):
        reason = why_not(layer)
        fused += reason is None
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
    total = len(linears) + sum(3 * m.num_experts for m in modules if isinstance(m, FrozenFloat8Experts))
    if fused >= ENOUGH * total:
        return Chosen(mode, f"{fused} of {total} FP8 linears multiply in FP8, forward and backward")
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    most = max(reasons, key=lambda reason: reasons[reason], default=f"decoder '{kind}' runs layer by layer")
    if fused and total > len(linears):
        most = "experts run one by one"
    return _set(modules, Chosen("none", most))


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


def grouped_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The linears of the decoder layers that `fuse` has bound."""
    for module in model.modules():
        group: Any
        for group in module.__dict__.get(FUSED, ()):
            yield from group.layers


def why_not(layer: nn.Module) -> str | None:
    """The reason why a linear of a bound layer is not fused, or None."""
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    if not isinstance(base, FrozenFloat8Linear):
        return "linears in 16 bit"
    granularity = base.rule.granularity
    ops = ("linear",) if isinstance(granularity, PerBlock) else ("linear", "linear_dx")  # blocks take another way back
    for op in ops:
        refused = _refused(base, op, granularity, base.activation)
        if refused:
            return refused
    if isinstance(layer, LoraLinear) and any(getattr(d, "p", 0.0) > 0 for d in layer.lora_dropout.values()):
        return "dropout on the inputs of adapters"
    return None if projection_of(layer) is not None else f"adapters or hooks of {type(layer).__name__}"
