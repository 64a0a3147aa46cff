"""Checkpoint in, FP8 checkpoint out, streaming: peak memory is a few slices, whatever the size of the model.

quantize, export and requantize all end here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import octavo
from octavo.base.errors import ConfigError, did_you_mean
from octavo.base.log import Advance
from octavo.base.report import atomic_write
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe
from octavo.store import schema
from octavo.store.carry import carry_over
from octavo.store.folder import OutputFolder, check_apart, check_output, check_space, copy_side_files
from octavo.store.kv_scales import KV_CACHE_SCHEME, KV_CACHES, kv_tensors
from octavo.store.manifest import MANIFEST, Manifest, fingerprint, plain_recipe
from octavo.store.moments import Moments
from octavo.store.pieces import Piece
from octavo.store.plan import Outcome, Plan, make_plan
from octavo.store.runner import Task, default_workers, run_tasks, worker_pool, write_shards
from octavo.store.scales import Scales
from octavo.store.slices import (
    SLICE,
    Edit,
    Observe,
    Quantize,
    SliceWork,
    Together,
    batches,
    quantize_llmcompressor,
    quantize_reference,
    row_ranges,
)
from octavo.store.tensors import Checkpoint
from octavo.store.writer import DEFAULT_SHARD, Entries, ShardWriter

COMPAT = ("llmcompressor",)
Examine = Callable[[Entries, dict[str, Any]], None]


@dataclass(frozen=True)
class ConversionSummary:
    """bytes_in, bytes_out: of tensors. seconds: wall clock. outcomes: one per module that matters.

    resumed: shards that an earlier, killed run had finished. left_out: side files too large to copy. lost_keys: of the
    old quantization_config, what the new one has no place for.
    """

    out: Path
    bytes_in: int
    bytes_out: int
    seconds: float
    outcomes: list[Outcome]
    files: list[str]
    resumed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    lost_keys: list[str] = field(default_factory=list)
    quantization_config: dict[str, Any] = field(default_factory=dict)

    @property
    def quantized(self) -> list[str]:
        """Modules that became FP8."""
        return [outcome.module for outcome in self.outcomes if outcome.rule]


def convert_checkpoint(
    source: Checkpoint,
    out: Path,
    recipe: Recipe,
    *,
    layout: str = "ct",
    quantize: Quantize = quantize_reference,
    together: Together | None = None,
    edit: Edit | None = None,
    edit_id: str | None = None,
    examine: Examine = lambda entries, quantization: None,
    observe: Observe | None = None,
    scales: Scales | None = None,
    kv_cache: str = "16bit",
    calibrated: Moments | None = None,
    slice_values: int = SLICE,
    dequantize: bool = False,
    compat: str | None = None,
    max_shard_size: int = DEFAULT_SHARD,
    made_by: str = "octavo.store.convert_checkpoint",
    advance: Advance = lambda amount: None,
    workers: int | None = None,
) -> ConversionSummary:
    """Write `source`, quantized by `recipe`, to the new folder `out`; side files and config.json included.

    quantize(x, rule, scale, module) -> ScaledTensor: the arithmetic, on slices [rows, K] that are cut at block borders,
    of about `slice_values`. together: the same for several whole matrices, where rounding is compensated.
    calibrated: the modules that it can round so; the others are rounded to nearest, and their outcome says so.
    edit(name, tensor) -> tensor: changes a weight before it is quantized (a merge); called with whole tensors, returns
    the same object where it changes nothing. edit_id: names edit and calibration; without it nothing is resumed.
    examine(entries, quantization_config): sees the output's tensors before anything is written, and may raise.
    observe(module, first row, slice before, slice after): sees every quantized slice, one at a time.
    scales: for static activations, and for kv_cache `fp8`, which stores and declares those of keys and values.
    dequantize: take FP8 input, too. compat: `llmcompressor`, for comparisons. advance: called with bytes that are done.

    All or nothing, also under kill -9; an identical call resumes. InputError and its kind say what is wrong.
    """
    started = time.perf_counter()
    check_paths(source.folder, out)
    quantize, scale_dtype = (quantize, torch.float32) if compat is None else (_compat(compat), torch.bfloat16)
    plan = make_plan(
        source, recipe, layout, dequantize=dequantize, scales=scales, calibrated=calibrated, scale_dtype=scale_dtype
    )
    kv = _kv_tensors(kv_cache, scales, source, plan)
    quantization, lost = _quantization(source, plan, recipe, bool(kv))
    examine(plan.entries, quantization)
    source_print = fingerprint(source)
    once = (edit is not None or calibrated is not None) and edit_id is None
    settings = (edit_id, compat, max_shard_size, {name: float(scale) for name, scale in kv.items()})
    job = None if once else _job(source_print, plan, recipe, settings)
    with OutputFolder(out, job) as folder:
        writer = ShardWriter(folder.path, plan.entries, max_shard_size=max_shard_size)
        check_space(folder.path, writer.missing_size)
        work = SliceWork(source, plan, writer, quantize, together, observe, own_scales=compat is not None)
        resumed = _run(work, edit, workers or default_workers(), advance, slice_values, kv, calibrated)
        writer.finish()
        options = {"layout": layout, "compat": compat, "edited": edit is not None, "kv_cache": kv_cache}
        left_out = finish_folder(folder, source, quantization, made_by, recipe, source_print, options)
    lists = {"resumed": resumed, "left_out": left_out, "lost_keys": lost}
    return summarize(source, out, writer, plan.outcomes, quantization, started, **lists)


def _quantization(source: Checkpoint, plan: Plan, recipe: Recipe, kv: bool) -> tuple[dict[str, Any], list[str]]:
    """The new quantization_config, with what it keeps of the source's, and the keys that it cannot."""
    old, po2 = schema.stored_quantization(source), recipe.rule.scale_format == "po2"
    quantization, lost = carry_over(old, plan.quantization_config(recipe), powers_of_two=po2)
    quantization |= {"kv_cache_scheme": KV_CACHE_SCHEME} if kv and plan.layout == "ct" else {}
    return quantization, lost


def summarize(
    source: Checkpoint,
    out: Path,
    writer: ShardWriter,
    outcomes: list[Outcome],
    quantization: dict[str, Any],
    started: float,
    **lists: list[str],
) -> ConversionSummary:
    """started: time.perf_counter() of the job's first line. lists: resumed, left_out."""
    return ConversionSummary(
        out,
        bytes_in=source.nbytes,
        bytes_out=writer.total_size,
        seconds=time.perf_counter() - started,
        outcomes=outcomes,
        files=list(writer.shards),
        quantization_config=quantization,
        **lists,
    )


def check_paths(source: Path, out: Path) -> None:
    """InputError if `out` is taken, or is not apart from the model."""
    check_apart(source, out)
    check_output(out, OutputFolder(out, None).path)


def finish_folder(
    folder: OutputFolder,
    source: Checkpoint,
    quantization: dict[str, Any],
    made_by: str,
    recipe: Recipe,
    source_print: str,
    options: dict[str, Any],
) -> list[str]:
    """Side files, config.json and manifest, and then the name. Returns the files that were too large to copy."""
    _, left_out = copy_side_files(source.folder, folder.path)
    write_config(source.config, folder.path, quantization)
    manifest = Manifest.collect(made_by, recipe=recipe, folder=folder.path, source=source_print, options=options)
    manifest.write(folder.path / MANIFEST)
    folder.commit()
    return left_out


def write_config(config: dict[str, Any], folder: Path, quantization: dict[str, Any] | None) -> None:
    """config.json with this quantization_config (None: without one), in place of what it had before."""
    gone = ("quantization_config", "compression_config")
    kept = {k: v for k, v in config.items() if k not in gone}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = {k: v for k, v in kept["text_config"].items() if k not in gone}
    if quantization is not None:
        kept["quantization_config"] = quantization
    atomic_write(folder / "config.json", json.dumps(kept, indent=2).encode() + b"\n")


def _kv_tensors(kv_cache: str, scales: Scales | None, source: Checkpoint, plan: Plan) -> dict[str, torch.Tensor]:
    """Scales of an FP8 KV cache, which take the place of those that the source may hold; none for a 16-bit cache."""
    if kv_cache not in KV_CACHES:
        raise ConfigError(f"KV cache '{kv_cache}' is unknown", fix=did_you_mean(kv_cache, KV_CACHES))
    if kv_cache == "16bit":
        return {}
    if scales is None:
        fix = "Run octavo calibrate and give its scales.json."
        raise ConfigError("FP8 KV cache", got="no scales.json", need="calibrated scales of keys and values", fix=fix)
    found = kv_tensors(scales, source, plan.layout)
    plan.pieces = [piece for piece in plan.pieces if piece.name not in found]
    plan.entries.update({name: (scale.dtype, tuple(scale.shape)) for name, scale in found.items()})
    return found


def _put(writer: ShardWriter, name: str, tensor: torch.Tensor) -> int:
    writer.put(name, tensor)
    return 0


def _run(
    work: SliceWork,
    edit: Edit | None,
    workers: int,
    advance: Advance,
    values: int,
    ready: Mapping[str, torch.Tensor],
    calibrated: Moments | None,
) -> list[str]:
    """Both passes: amax of what has one scale per tensor, then everything into its shard, with what is ready."""
    pieces = work.plan.pieces
    undone = {file for file in work.writer.shards if not work.writer.done(file)}
    needed = {
        work.plan.amax_group[piece.module]
        for piece in pieces
        if piece.module in work.plan.amax_group and work.writer.shard_of[piece.name] in undone
    }
    shared = [piece for piece in pieces if work.plan.amax_group.get(piece.module) in needed and _is_shared(work, piece)]
    if shared:
        with worker_pool(workers) as pool:
            for _ in run_tasks(pool, _tasks(work, shared, edit, work.measure, values), workers):
                pass
    by_file: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(work.writer.shard_of[piece.name], []).append(piece)
    writer = work.writer

    def tasks_of(file: str) -> Iterator[Task]:
        here = by_file.get(file, [])
        for batch in batches(here, work.plan, calibrated) if calibrated and work.together else ([p] for p in here):
            if len(batch) == 1:
                yield from _tasks(work, batch, edit, work.convert, values)
            else:
                yield partial(work.convert_together, [(piece, _edited(work, edit, piece)) for piece in batch])
        yield from (partial(_put, writer, name, x) for name, x in ready.items() if writer.shard_of[name] == file)

    return write_shards(writer, tasks_of, workers, advance)


def _is_shared(work: SliceWork, piece: Piece) -> bool:
    found = work.plan.rule_of(piece)
    return found is not None and found.rule is not None and isinstance(found.rule.granularity, PerTensor)


def _tasks(
    work: SliceWork, pieces: Iterable[Piece], edit: Edit | None, run: Callable[..., int], values: int
) -> Iterator[Task]:
    for piece in pieces:
        edited = _edited(work, edit, piece)
        found = work.plan.rule_of(piece)
        granularity = found.rule.granularity if found and found.rule else None
        for start, stop in row_ranges(piece, granularity, values):
            yield partial(run, piece, start, stop, edited)


def _edited(work: SliceWork, edit: Edit | None, piece: Piece) -> torch.Tensor | None:
    """What `edit` makes of a whole piece; None where it changes nothing."""
    if edit is None or not piece.dtype.is_floating_point:
        return None
    whole = work.read(piece, 0, piece.shape[0] if piece.shape else 1, None)
    edited = edit(piece.name, whole)
    if edited is whole:
        return None
    if tuple(edited.shape) != piece.shape:
        got = f"{list(edited.shape)} back for {piece.name}"
        raise ConfigError("edit of a conversion", got=got, need=str(list(piece.shape)))
    return edited


def _compat(name: str) -> Quantize:
    if name not in COMPAT:
        raise ConfigError(f"compat '{name}' is unknown", fix=f"Known: {', '.join(COMPAT)}.")
    return quantize_llmcompressor


def _job(source: str, plan: Plan, recipe: Recipe, options: tuple[object, ...]) -> str:
    """Everything that decides the bytes of a shard."""
    entries = [(name, str(dtype), shape) for name, (dtype, shape) in plan.entries.items()]
    rules = [(module, str(a.rule)) for module, a in plan.assignments.items() if a.rule]
    versions = (octavo.__version__, torch.__version__)
    facts = (source, plan.layout, plain_recipe(recipe), options, versions, entries, rules, plan.input_scales)
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
