"""ct <-> native without touching a code or a scale: names, shapes of scale tensors and config.json change, no value."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from octavo.base.errors import CheckpointError, ConfigError
from octavo.base.log import Advance
from octavo.formats.architectures import role
from octavo.formats.granularity import Granularity
from octavo.formats.recipe import Assignment, Recipe, Rule
from octavo.store import schema
from octavo.store.conversion import ConversionSummary, check_paths, finish_folder, summarize
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


def relayout(
    source: Checkpoint,
    out: Path,
    layout: str,
    *,
    max_shard_size: int = DEFAULT_SHARD,
    advance: Advance = lambda amount: None,
) -> ConversionSummary:
    """Write an FP8 checkpoint in another layout. Codes keep their bytes, scales their values (BF16 ones widen to FP32).

    ConfigError if the layout cannot hold what is there (scales per channel in native), CheckpointError if the input is
    not FP8 or a scale is missing.
    """
    started = time.perf_counter()
    check_paths(source.folder, out)
    scheme = schema.parse_quantization_config(source.config)
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
    entries = {move.name: (move.dtype, move.shape) for move in moves}
    with OutputFolder(out, None) as folder:
        writer = ShardWriter(folder.path, entries, max_shard_size=max_shard_size)
        check_space(folder.path, writer.total_size)
        by_file: dict[str, list[Task]] = {file: [] for file in writer.shards}
        for move in moves:
            by_file[writer.shard_of[move.name]].append(partial(_copy, source, writer, move))
        write_shards(writer, by_file.__getitem__, default_workers(), advance)
        writer.finish()
        quantization = schema.to_quantization_config(assignments, recipe, layout, shapes=source.shapes())
        print_, options = fingerprint(source), {"layout": layout}
        left_out = finish_folder(folder, source, quantization, "octavo relayout", recipe, print_, options)
    outcomes = [
        Outcome(m, str(a.rule) if a.rule else "", a.role, a.reason, source.shapes().get(f"{m}.weight", ()))
        for m, a in assignments.items()
        if a.role not in ("other", "norm")
    ]
    return summarize(source, out, writer, outcomes, quantization, started, left_out=left_out)


def _as_recipe(
    source: Checkpoint, scheme: schema.StoredScheme, modules: Iterable[str]
) -> tuple[Recipe, dict[str, Assignment]]:
    """The recipe and assignments that would have written this checkpoint. The most common group leads."""
    granularities: dict[str, Granularity] = {}
    for module in modules:
        q = schema.read_scaled(source, module, scheme)
        granularities[module] = q.granularity
    used = list(granularities.values())
    main = max(set(used), key=used.count)
    activation = next(g.activation for g in scheme.groups if g.granularity == main)
    recipe = Recipe("stored", Rule(granularity=main), activation)
    assignments = {}
    for name, shape in source.shapes().items():
        module = name.removesuffix(".weight")
        rule = Rule(granularity=granularities[module]) if module in granularities else None
        reason = "layout changed" if rule else "as it was"
        assignments[module] = Assignment(rule, role(name, shape, source.layers), reason)
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
