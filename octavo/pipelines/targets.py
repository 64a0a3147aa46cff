"""What a mixed-precision policy is to reach: a divergence, a share of bytes, or both; and what there is to choose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from octavo.base.errors import ConfigError
from octavo.pipelines.frontier import Choice, Option, frontier
from octavo.store.units import HIGH, Unit

Picks = dict[str, str]  # unit -> option
Losses = Mapping[str, Mapping[str, float]]  # option -> unit -> KL of the unit alone, nats per token


@dataclass(frozen=True)
class Target:
    """budget: the largest divergence, nats per token. keep: the largest share of the checkpoint's bytes that layers
    kept in 16 bit may take. At least one is given; with both, `keep` bounds what `budget` may cost."""

    budget: float | None
    keep: Fraction | None

    @classmethod
    def parse(cls, budget: str | None, keep: str | None) -> Target:
        """`kl=0.003` and `2%` (or `0.02`). ConfigError for anything else, or for neither."""
        if budget is None and keep is None:
            fix = "Give --budget kl=0.003 for the fewest bytes, or --keep 2% for the least divergence."
            raise ConfigError("tune without a target", fix=fix)
        return cls(_budget(budget) if budget else None, _share(keep) if keep else None)


def _budget(text: str) -> float:
    match = re.fullmatch(r"\s*kl\s*=\s*(\d*\.?\d+(?:e-?\d+)?)\s*", text, re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < 100:
        raise ConfigError("budget", got=repr(text), need="kl=VALUE in nats per token, such as kl=0.003")
    return float(match[1])


def _share(text: str) -> Fraction:
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*(%?)\s*", text)
    value = Fraction(match[1]) / (100 if match[2] else 1) if match else Fraction(-1)
    if not 0 <= value <= 1:
        raise ConfigError("keep", got=repr(text), need="a share of the bytes, such as 2% or 0.02")
    return value


def choices(units: Sequence[Unit], losses: Losses, total: int, keep: Fraction | None = None) -> list[Choice]:
    """The frontier of all ways to treat the units. total: bytes of the model in 16 bit.

    Without `keep`, a choice weighs what it is larger than everything in 16 bit, in bytes: its weight is negative. With
    it, weights are scaled so that those up to total * numerator hold the share exactly, in integers:
    kept <= keep * (total + larger), where both sides add up unit by unit.
    """
    groups = []
    for unit in units:
        options = []
        for option, size in unit.size.items():
            larger, kept = size - unit.size[HIGH], size if option == HIGH else 0
            weight = larger if keep is None else keep.denominator * kept - keep.numerator * larger
            options.append(Option(option, weight, 0.0 if option == HIGH else losses[option][unit.name]))
        groups.append(options)
    return frontier(groups, None if keep is None else keep.numerator * total)


def picks_of(units: Sequence[Unit], choice: Choice) -> Picks:
    """Unit -> option."""
    return {unit.name: list(unit.size)[index] for unit, index in zip(units, choice.picks, strict=True)}


@dataclass(frozen=True)
class Size:
    """total: bytes of all tensors. kept: of those, in units that stay in 16 bit though FP8 was possible."""

    total: int
    kept: int

    @property
    def share(self) -> float:
        return self.kept / self.total if self.total else 0.0


def size_of(units: Sequence[Unit], picks: Picks, total: int) -> Size:
    """The bytes of a checkpoint, or of a model in memory, whose units are as picked. total: of the model in 16 bit."""
    larger = sum(unit.size[picks[unit.name]] - unit.size[HIGH] for unit in units)
    return Size(total + larger, sum(unit.size[HIGH] for unit in units if picks[unit.name] == HIGH))


def corrected(
    estimates: Losses, few: Mapping[str, float], measured: Mapping[str, float], scheme: str
) -> dict[str, dict[str, float]]:
    """Estimates, scaled as the units that were measured turned out to be: each by its own factor, the rest by theirs.

    few: unit -> estimate on the text of the measurements, for `scheme`.
    """
    guessed = sum(few[unit] for unit in measured)
    common = sum(measured.values()) / guessed if guessed > 0 else 1.0
    own = {unit: kl / few[unit] for unit, kl in measured.items() if few[unit] > 0}
    return {
        option: {unit: loss * own.get(unit, common) for unit, loss in found.items()}
        for option, found in estimates.items()
    }
