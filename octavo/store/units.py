"""Units of mixed precision: what engines need in one scheme, with the bytes that every way of storing it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.formats.recipe import Recipe
from octavo.formats.rule import Assignment, Rule
from octavo.store import schema
from octavo.store.pieces import Piece, find_pieces
from octavo.store.plan import drop_impossible
from octavo.store.policy import unit_of
from octavo.store.tensors import Checkpoint

HIGH = "16bit"
MEMORY = "memory"  # beside the layouts of files: every ragged edge is fine


@dataclass(frozen=True)
class Unit:
    """Linears that are decided together: fused siblings, the experts of a layer, or one linear.

    modules: as the output names them. patterns: the same for a Recipe, one for all experts. size: option -> bytes of
    the weights and their scales; options are schemes and HIGH. rules: scheme -> rule of every pattern.
    """

    name: str
    modules: tuple[str, ...]
    patterns: tuple[str, ...]
    size: Mapping[str, int]
    rules: Mapping[str, Mapping[str, Rule]]


def find_units(source: Checkpoint, recipes: list[Recipe], layout: str) -> tuple[list[Unit], int]:
    """The units that the first recipe quantizes, in the order of the files, and the bytes of all tensors of `source`.

    recipes: the scheme and its alternatives; one that a layout makes the same as an earlier one is no option. layout:
    of the files, or MEMORY. ConfigError for what the layout cannot hold.
    """
    pieces = find_pieces(source)
    shapes = {piece.name: piece.shape for piece in pieces}
    weights = {piece.module: piece for piece in pieces if piece.name.endswith(".weight")}
    decided: dict[str, dict[str, Assignment]] = {}
    for recipe in recipes:
        if layout != MEMORY:
            schema.check_layout(layout, recipe)
        file = None if layout == MEMORY else layout
        found = recipe.assign(shapes, layout=file, layers=source.layers, config=source.text_config)
        decided[recipe.name] = drop_impossible(found, pieces)
    members: dict[str, list[str]] = {}
    for module, assignment in decided[recipes[0].name].items():
        if assignment.rule is not None:
            members.setdefault(unit_of(module), []).append(module)
    units = [_unit(name, modules, weights, decided) for name, modules in members.items()]
    return units, sum(_bytes(piece) for piece in pieces)


def _unit(
    name: str, modules: list[str], weights: Mapping[str, Piece], decided: Mapping[str, Mapping[str, Assignment]]
) -> Unit:
    pattern_of = {module: name if name.endswith(".*") else module for module in modules}
    size = {HIGH: sum(_bytes(weights[module]) for module in modules)}
    rules: dict[str, dict[str, Rule]] = {}
    for scheme, assignments in decided.items():
        found = {module: rule for module in modules if (rule := assignments[module].rule) is not None}
        by_pattern = {pattern_of[module]: rule for module, rule in found.items()}
        if len(found) == len(modules) and by_pattern not in rules.values():
            rules[scheme] = by_pattern
            size[scheme] = sum(quantized_bytes(weights[module].shape, rule) for module, rule in found.items())
    return Unit(name, tuple(modules), tuple(dict.fromkeys(pattern_of.values())), size, rules)


def quantized_bytes(shape: tuple[int, ...], rule: Rule) -> int:
    """Codes and float32 scales of a weight [N, K], in a file as in memory."""
    return math.prod(shape) + 4 * math.prod(rule.granularity.scale_shape(shape))


def mixed_recipe(base: Recipe, units: list[Unit], picks: Mapping[str, str]) -> Recipe:
    """`base` with every unit as `picks` (unit -> option, default the base's own) has it, in memory as in a file."""
    overrides: dict[str, Rule | None] = {}
    for unit in units:
        option = picks.get(unit.name, base.name)
        for pattern in unit.patterns:
            rule = None if option == HIGH else unit.rules[option][pattern]
            if rule != base.rule:
                overrides[pattern] = rule
    return replace(base, overrides=(*overrides.items(), *base.overrides))


def _bytes(piece: Piece) -> int:
    return math.prod(piece.shape) * piece.dtype.itemsize
