"""ct <-> native without touching a code or a scale: names, shapes of scale tensors and config.json change, no value."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.base.errors import CheckpointError, ConfigError
from octavo.base.log import Advance
from octavo.formats.architectures import role
from octavo.formats.granularity import Granularity
from octavo.formats.recipe import Recipe
from octavo.formats.rule import Assignment, Rule
from octavo.store import schema
from octavo.store.carry import carry_over
from octavo.store.conversion import ConversionSummary, Examine, check_paths, finish_folder, summarize
from octavo.store.folder import OutputFolder, check_space
from octavo.store.manifest import fingerprint
from octavo.store.pieces import is_float8
from octavo.store.plan import Outcome
from octavo.store.runner import Task, default_workers, write_shards
from octavo.store.tensors import Checkpoint
from octavo.store.writer import DEFAULT_SHARD, ShardWriter


@dataclass(frozen=True)
class Move:
    """A stored tensor and what it becomes."""

    source: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Relayout:
    """A change of layout, decided by headers alone. quantization: the new quantization_config.

    lost: keys of the old quantization_config that the new layout has no place for.
    """

    recipe: Recipe
    assignments: dict[str, Assignment]
    moves: list[Move]
    quantization: dict[str, Any]
    lost: list[str]

    @property
    def entries(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The tensors of the output."""
        return {move.name: (move.dtype, move.shape) for move in self.moves}


def plan_relayout(source: Checkpoint, layout: str) -> Relayout:
    """ConfigError if the layout cannot hold what is there (scales per channel in native), CheckpointError if the input
    is not FP8 or a scale is missing."""
    stored = schema.stored_quantization(source)
    scheme = schema.parse_quantization_config(stored)
    modules = [n.removesuffix(".weight") for n in source if is_float8(source.dtype(n)) and n.endswith(".weight")]
    if scheme.layout == "none" or not modules:
        raise CheckpointError(
            f"{source.folder}", got="no FP8 weights", need="an FP8 checkpoint to change the layout of"
        )
    recipe, assignments = _as_recipe(source, scheme, modules)
    schema.check_layout(layout, recipe)
    if layout == "native" and len({a.rule for a in assignments.values() if a.rule}) > 1:
        raise ConfigError("layout native", got="a model with two kinds of scales", need="one", fix="Keep layout ct.")
    moves = list(_moves(source, scheme, assignments, layout))
    fresh = schema.to_quantization_config(assignments, recipe, layout, shapes=source.shapes())
    return Relayout(recipe, assignments, moves, *carry_over(stored, fresh))


def relayout(
    source: Checkpoint,
    out: Path,
    layout: str,
    *,
    max_shard_size: int = DEFAULT_SHARD,
    made_by: str = "octavo relayout",
    examine: Examine = lambda entries, quantization: None,
    advance: Advance = lambda amount: None,
) -> ConversionSummary:
    """Write an FP8 checkpoint in another layout. Codes keep their bytes, scales their values (BF16 ones widen to FP32).

    What the old config says of the KV cache, and other keys that the layout has a place for, stay. examine: as of
    convert_checkpoint. Errors as `plan_relayout`.
    """
    started = time.perf_counter()
    check_paths(source.folder, out)
    plan = plan_relayout(source, layout)
    examine(plan.entries, plan.quantization)
    with OutputFolder(out, None) as folder:
        writer = ShardWriter(folder.path, plan.entries, max_shard_size=max_shard_size)
        check_space(folder.path, writer.total_size)
        by_file: dict[str, list[Task]] = {file: [] for file in writer.shards}
        for move in plan.moves:
            by_file[writer.shard_of[move.name]].append(partial(_copy, source, writer, move))
        write_shards(writer, by_file.__getitem__, default_workers(), advance)
        writer.finish()
        print_, options = fingerprint(source), {"layout": layout}
        left_out = finish_folder(folder, source, plan.quantization, made_by, plan.recipe, print_, options)
    outcomes = [
        Outcome(m, str(a.rule) if a.rule else "", a.role, a.reason, source.shapes().get(f"{m}.weight", ()))
        for m, a in plan.assignments.items()
        if a.role not in ("other", "norm")
    ]
    lists = {"left_out": left_out, "lost_keys": plan.lost}
    return summarize(source, out, writer, outcomes, plan.quantization, started, **lists)


def _as_recipe(
    source: Checkpoint, scheme: schema.StoredScheme, modules: Iterable[str]
) -> tuple[Recipe, dict[str, Assignment]]:
    """The recipe and assignments that would have written this checkpoint. The most common kind leads."""
    kinds: dict[str, tuple[Granularity, str]] = {}
    for module in modules:
        group = scheme.group_of(module)
        granularity = schema.read_scaled(source, module, scheme).granularity
        kinds[module] = granularity, group.activation if group else "none"
    used = list(kinds.values())
    granularity, activation = max(dict.fromkeys(used), key=used.count)
    recipe = Recipe("stored", Rule(granularity=granularity), activation)
    assignments = {}
    for name, shape in source.shapes().items():
        module = name.removesuffix(".weight")
        rule = Rule(granularity=kinds[module][0]) if module in kinds else None
        reason, mode = ("layout changed", kinds[module][1]) if rule else ("as it was", None)
        assignments[module] = Assignment(rule, role(name, shape, source.layers), reason, mode)
    return recipe, assignments


def _moves(
    source: Checkpoint, scheme: schema.StoredScheme, assignments: dict[str, Assignment], layout: str
) -> Iterable[Move]:
    scale_of = {schema.stored_scale_name(source, m): m for m, a in assignments.items() if a.rule is not None}
    for name in source:
        info = source.info(name)
        module, _, leaf = name.rpartition(".")
        if name in scale_of:
            granularity = assignments[module].rule.granularity  # type: ignore[union-attr]
            shape = schema.file_scale_shape(source.shape(f"{module}.weight"), granularity, layout)
            yield Move(name, schema.scale_name(module, granularity, layout), torch.float32, shape)
        elif leaf in (schema.INPUT_SCALE, "activation_scale"):
            shape = (1,) if layout == "ct" else ()
            yield Move(name, f"{module}.{schema.INPUT_SCALE}", torch.float32, shape)
        else:
            yield Move(name, name, info.dtype, info.shape)


def _copy(source: Checkpoint, writer: ShardWriter, move: Move) -> int:
    stored = source.get(move.source)
    writer.put(move.name, stored.to(move.dtype).reshape(move.shape))
    return stored.nbytes
