"""What a conversion will do, decided before a byte is written: pieces, rules, and the tensors of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from octavo.base.errors import ConfigError, MismatchError
from octavo.formats.architectures import fused_group
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.rule import Assignment
from octavo.store import schema
from octavo.store.moments import Moments
from octavo.store.pieces import Piece, find_pieces, restack
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint
from octavo.store.writer import Entries


@dataclass(frozen=True)
class Outcome:
    """What becomes of one module. rule: in words, empty for 16 bit. shape: of its weight. reason: of the recipe."""

    module: str
    rule: str
    role: str
    reason: str
    shape: tuple[int, ...]


@dataclass
class Plan:
    """entries: the tensors of the output, in order. amax_group: module -> the modules that share its one scale."""

    pieces: list[Piece]
    assignments: dict[str, Assignment]
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    layout: str
    outcomes: list[Outcome]
    amax_group: dict[str, str] = field(default_factory=dict)
    input_scales: dict[str, float] = field(default_factory=dict)

    def rule_of(self, piece: Piece) -> Assignment | None:
        """The assignment of a piece that gets quantized, else None."""
        found = self.assignments.get(piece.module) if piece.name.endswith(".weight") else None
        return found if found is not None and found.rule is not None else None

    def quantization_config(self, recipe: Recipe) -> dict[str, Any]:
        """Of the output; experts that stay stacked are in its skip list one by one, too."""
        shapes = {piece.name: piece.shape for piece in self.pieces}
        shapes |= {f"{outcome.module}.weight": outcome.shape for outcome in self.outcomes if outcome.role == "expert"}
        return schema.to_quantization_config(self.assignments, recipe, self.layout, shapes=shapes)


def make_plan(
    source: Checkpoint,
    recipe: Recipe,
    layout: str,
    *,
    dequantize: bool = False,
    scales: Scales | None = None,
    calibrated: Moments | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> Plan:
    """Assign a rule to every module of `source` and lay out the output. Reads headers only.

    ConfigError for a combination that no engine runs or that slices cannot compute, MismatchError for static
    activations without a scale.
    """
    schema.check_layout(layout, recipe)
    _check_sliceable(recipe, calibrated)
    pieces = find_pieces(source, dequantize=dequantize)
    shapes = {piece.name: piece.shape for piece in pieces}
    decided = recipe.assign(shapes, layout=layout, layers=source.layers, config=source.text_config)
    decided = _nearest_elsewhere(drop_impossible(decided, pieces), calibrated)
    pieces = restack(pieces, {m: a.rule is not None for m, a in decided.items()}, source)
    plan = Plan(pieces, decided, {}, layout, _outcomes(decided, shapes))
    plan.amax_group = _shared_scales(decided)
    if recipe.activation == "static":
        plan.input_scales = _static_scales(decided, recipe, layout, scales)
    for piece in pieces:
        plan.entries.update(_entries(piece, plan, scale_dtype))
    return plan


def _check_sliceable(recipe: Recipe, calibrated: Moments | None) -> None:
    rules = [recipe.rule, *(rule for _, rule in recipe.overrides if rule)]
    for rule in rules:
        if rule.rounding != "nearest" and calibrated is None:
            got = f"rounding '{rule.rounding}', which needs the inputs of every layer"
            raise ConfigError(
                "conversion without data", got=got, fix="Give calibration data, or use --rounding nearest."
            )
        if rule.method != "absmax" and isinstance(rule.granularity, PerTensor):
            raise ConfigError(
                f"scale method '{rule.method}' with one scale per tensor", need="scheme channel or block128"
            )


def _nearest_elsewhere(decided: Mapping[str, Assignment], calibrated: Moments | None) -> dict[str, Assignment]:
    """Compensated rounding needs the inputs of a linear: without them it is rounded to nearest, and says so."""
    result = dict(decided)
    for module, found in decided.items():
        if found.rule is not None and found.rule.rounding != "nearest" and module not in (calibrated or ()):
            why = calibrated.missing(module) if calibrated is not None else "its inputs were not calibrated"
            reason = f"{found.reason}; {why}, so it is rounded to nearest"
            result[module] = replace(found, rule=found.rule.rounded("nearest"), reason=reason)
    return result


def drop_impossible(decided: dict[str, Assignment], pieces: list[Piece]) -> dict[str, Assignment]:
    """Weights that hold no floats, or hold nothing, stay as they are; so do stacks whose orientation is unknown."""
    result = dict(decided)
    for piece in pieces:
        found = result.get(piece.module)
        if found is None or found.rule is None:
            continue
        if len(piece.shape) != 2 or not piece.name.endswith(".weight"):
            reason = "stacked experts whose orientation config.json does not tell"
        elif not piece.dtype.is_floating_point or 0 in piece.shape:
            reason = f"{str(piece.dtype).removeprefix('torch.')} {list(piece.shape)} is not a matrix of floats"
        else:
            continue
        result[piece.module] = replace(found, rule=None, reason=reason)
    return result


def _outcomes(decided: Mapping[str, Assignment], shapes: Mapping[str, tuple[int, ...]]) -> list[Outcome]:
    result = []
    for module, a in decided.items():
        shape = shapes.get(f"{module}.weight", shapes.get(module, ()))
        if a.role not in ("other", "norm") or a.rule is not None:
            result.append(Outcome(module, str(a.rule) if a.rule else "", a.role, a.reason, shape))
    return result


def _shared_scales(decided: Mapping[str, Assignment]) -> dict[str, str]:
    """Modules with one scale per tensor -> the fused matrix that they are a shard of, or themselves."""
    groups = {}
    for module, found in decided.items():
        if found.rule is not None and isinstance(found.rule.granularity, PerTensor):
            fused = fused_group(module)
            groups[module] = fused[0] if fused else module
    return groups


def _static_scales(
    decided: Mapping[str, Assignment], recipe: Recipe, layout: str, scales: Scales | None
) -> dict[str, float]:
    """Module -> input scale; the largest of the fused siblings, since engines take that one for all of them."""
    quantized = [module for module, found in decided.items() if found.rule is not None]
    modules = [m for m in quantized if schema.activation_of(decided[m], recipe, layout) == "static"]
    if scales is None:
        fix = "Run octavo calibrate and give its scales.json."
        raise MismatchError("static activations", got="no scales.json", need="one input scale per linear", fix=fix)
    scales.require(modules)
    largest: dict[str, float] = {}
    for module in modules:
        fused = (fused_group(module) or (module,))[0]
        largest[fused] = max(largest.get(fused, 0.0), scales.modules[module].input_scale)
    return {module: largest[(fused_group(module) or (module,))[0]] for module in modules}


def _entries(piece: Piece, plan: Plan, scale_dtype: torch.dtype) -> Entries:
    found = plan.rule_of(piece)
    if found is None or found.rule is None:
        return {piece.name: (piece.dtype, piece.shape)}
    granularity = found.rule.granularity
    scale_shape = schema.file_scale_shape(piece.shape, granularity, plan.layout)
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        piece.name: (found.rule.spec.dtype, piece.shape),
        schema.scale_name(piece.module, granularity, plan.layout): (scale_dtype, scale_shape),
    }
    if piece.module in plan.input_scales:
        shape = (1,) if plan.layout == "ct" else ()
        entries[f"{piece.module}.{schema.INPUT_SCALE}"] = (torch.float32, shape)
    return entries
