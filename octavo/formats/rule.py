"""Rule: how one tensor is quantized. Assignment: the rule that a recipe decided on for one module, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.base.errors import ConfigError, did_you_mean
from octavo.formats.granularity import Granularity, PerRow, PerTensor
from octavo.formats.scale import SCALE_FORMATS, SCALE_METHODS
from octavo.formats.spec import E4M3, FloatSpec

ROUNDINGS = ("nearest", "compensated")


@dataclass(frozen=True)
class Rule:
    """How the values of one tensor become codes and scales."""

    spec: FloatSpec = E4M3
    granularity: Granularity = PerRow()
    method: str = "absmax"
    scale_format: str = "fp32"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        one_of("scale method", self.method, SCALE_METHODS)
        one_of("scale format", self.scale_format, SCALE_FORMATS)
        one_of("rounding", self.rounding, ROUNDINGS)

        if self.method == "hessian" and self.rounding == "nearest":
            fix = "Use rounding 'compensated', which has them, or method 'mse'."
            raise ConfigError("scale method 'hessian' needs the moments of a calibration", fix=fix)

    def rounded(self, rounding: str, method: str | None = None) -> Rule:
        """This rule with another rounding. method: of the scales; None is the best that costs no further data."""
        if method is None and rounding == "compensated":
            method = self.method if isinstance(self.granularity, PerTensor) else "hessian"
        if method is None:
            method = "absmax" if self.method == "hessian" else self.method
        return replace(self, rounding=rounding, method=method)

    def per(self, granularity: Granularity) -> Rule:
        """This rule with scales per something else; one scale per tensor, which siblings share, is not searched."""
        method = "absmax" if isinstance(granularity, PerTensor) else self.method
        return replace(self, granularity=granularity, method=method)

    def __str__(self) -> str:
        extra = [x for x in (self.scale_format, self.method, self.rounding) if x not in ("fp32", "absmax", "nearest")]
        return " ".join([f"{self.spec} {self.granularity}", *extra])


@dataclass(frozen=True)
class Assignment:
    """What a recipe decides for one module. rule None: stays as it is. reason: in words, for the report.

    activation: what a file declares for the module's inputs; None: the recipe's own.
    """

    rule: Rule | None
    role: str
    reason: str
    activation: str | None = None


def one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    """ConfigError that names the nearest known value, unless `value` is one."""
    if value not in known:
        raise ConfigError(f"{what} '{value}' is unknown", fix=did_you_mean(value, known))
