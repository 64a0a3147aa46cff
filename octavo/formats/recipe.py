"""Recipe: which tensor gets which rule, and what stays in 16 bit.

Recipe.named("channel").assign(shapes)  ->  {module: Assignment(rule or None, reason)}
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.base.errors import ConfigError, did_you_mean, require_type
from octavo.formats.architectures import role
from octavo.formats.fitting import fit_file, fused_groups, unite_experts
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.rule import Assignment, Rule, one_of

# none: weight-only. static: one calibrated scale per tensor. token: one scale per row. group128: one per 128 values.
ACTIVATIONS = ("none", "static", "token", "group128")
QUANTIZED_ROLES = frozenset({"linear", "expert"})


@dataclass(frozen=True)
class Recipe:
    """A base rule, what the activations do when served, and the exceptions.

    skip: patterns of modules that stay in 16 bit: a full name, a glob with `*`, or `re:` and a regular expression.
    overrides: (pattern, rule or None), first match wins, before the base rule.
    """

    name: str = "channel"
    rule: Rule = field(default_factory=Rule)
    activation: str = "token"
    skip: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Rule | None], ...] = ()

    def __post_init__(self) -> None:
        one_of("activation mode", self.activation, ACTIVATIONS)

    @classmethod
    def named(
        cls, name: str, *, activation: str | None = None, skip: tuple[str, ...] = (), **rule: str | None
    ) -> Recipe:
        """A preset: `channel`, `block128` or `tensor`, with fields of the Rule replaced by keyword."""
        require_type("recipe", name, str)
        if name not in PRESETS:
            raise ConfigError(f"scheme '{name}' is unknown", fix=did_you_mean(name, PRESETS))
        base = PRESETS[name]
        given = {k: v for k, v in rule.items() if v is not None}
        rounding, method = given.pop("rounding", base.rule.rounding), given.pop("method", None)
        fixed = replace(base.rule, **given).rounded(rounding, method)  # type: ignore[arg-type]
        return replace(base, rule=fixed, activation=activation or base.activation, skip=skip)

    @property
    def compensated(self) -> bool:
        """Whether a rule rounds with compensation, which needs the moments of a calibration."""
        rules = [self.rule, *(rule for _, rule in self.overrides)]
        return any(rule is not None and rule.rounding != "nearest" for rule in rules)

    def wanted(self, module: str, kind: str) -> Assignment:
        """The decision for one module, fused siblings aside."""
        if kind not in QUANTIZED_ROLES:
            return Assignment(None, kind, f"{kind} stays in 16 bit")
        for pattern in self.skip:
            if matches(pattern, module):
                return Assignment(None, kind, f"skipped by '{pattern}'")
        for pattern, rule in self.overrides:
            if matches(pattern, module):
                return Assignment(rule, kind, f"override '{pattern}'")
        return Assignment(self.rule, kind, "recipe")

    def assign(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        layout: str | None = None,
        layers: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Assignment]:
        """Decide for every tensor of a model; keys of the result are module names (`.weight` removed).

        shapes: tensor name -> shape. layout: `ct` or `native` also applies what engines can load from a file of
        that layout (see fitting.py); None is for use in memory, where every ragged edge is fine. config: the language
        model's part of config.json, which tells the shards of matrices that are fused on disk.
        """
        result = {}
        for tensor, shape in shapes.items():
            module = tensor.removesuffix(".weight")
            result[module] = self.wanted(module, role(tensor, tuple(shape), layers))
        rows_cols = {t.removesuffix(".weight"): tuple(s[-2:]) for t, s in shapes.items()}
        for group in fused_groups(result):
            high = next((m for m in group if result[m].rule is None), None)
            for module in group:
                if high is not None and result[module].rule is not None:
                    reason = f"{high} stays in 16 bit, and engines fuse the two"
                    result[module] = replace(result[module], rule=None, reason=reason)
        if layout is not None:
            result = fit_file(result, rows_cols, layout, self.activation, config or {})
        unite_experts(result)
        return result


def matches(pattern: str, module: str) -> bool:
    """A full module name, a glob, or `re:` and a regular expression that matches from the start."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module or fnmatch.fnmatchcase(module, pattern)


PRESETS = {
    "channel": Recipe("channel", Rule(granularity=PerRow()), "token"),
    "block128": Recipe("block128", Rule(granularity=PerBlock(128, 128)), "group128"),
    "tensor": Recipe("tensor", Rule(granularity=PerTensor()), "token"),
}
