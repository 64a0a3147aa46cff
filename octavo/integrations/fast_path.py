"""Whether rounding the inputs of a model's FP8 linears pays: where that makes them FP8 products both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from octavo.base.log import logger
from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.scale import is_power_of_two
from octavo.integrations.layers import decoder
from octavo.integrations.survey import refused, survey
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear

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


def _blocks_to_rows(linears: Sequence[FrozenFloat8Linear]) -> None:
    """All of them or none: layers that share an input are of one kind."""
    blocks = [m for m in linears if m.rule.granularity == BLOCK]
    if not blocks or any(refused(m, "linear", PerRow(), "token") for m in blocks):
        return
    if all(bool(is_power_of_two(m.weight_scale).all()) for m in blocks):
        changed, total = sum(m.to_rows() for m in blocks), sum(m.weight.numel() for m in blocks)
        logger().info("block scales as row scales: %d of %d codes lost bits to a subnormal", changed, total)


def _set(modules: Sequence[FrozenFloat8Linear | FrozenFloat8Experts], chosen: Chosen) -> Chosen:
    for module in modules:
        module.activation = chosen.activation
    return chosen
