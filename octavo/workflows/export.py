"""export: a training run becomes a checkpoint for serving, and what the merge did to the adapter is measured.

Rounding to FP8 has a step of 6 % of a value; the change that LoRA makes is often 1 %. Merged onto weights that lie on
the FP8 grid already, most of it rounds away. Merged onto the original weights, rounding hits base and change alike, and
on average all of the change arrives. Either way the share that survives is measured, layer by layer.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Literal

import pydantic

from octavo.base.errors import CheckpointError, ConfigError, RefusedError
from octavo.base.log import logger, progress
from octavo.base.report import Config, Report
from octavo.formats.recipe import Recipe
from octavo.integrations.hub import resolve_model
from octavo.ops.rounding import SLICE as COMPENSATED_SLICE
from octavo.ops.rounding import Compensator, round_nearest
from octavo.store.adapter import Adapter
from octavo.store.conversion import ConversionSummary, convert_checkpoint
from octavo.store.folder import check_output
from octavo.store.manifest import fingerprint
from octavo.store.merge import LayerKept, Merge, Survival
from octavo.store.moments import Moments
from octavo.store.run import RunFolder
from octavo.store.scales import Scales
from octavo.store.slices import SLICE
from octavo.store.tensors import Checkpoint

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes
MEASURED_ON = f"{Survival.PROBES} random normal inputs a layer"


class ExportConfig(Config):
    """run: a finished run folder. out: the new checkpoint folder.

    merge: `original` adds the adapter to the original weights in float32 and quantizes the sum; `dequantized` adds it
    to the FP8 weights the run trained over; `none` writes the FP8 base and, in `adapter/`, the adapter beside it.
    min_kept: refuse below this share of the adapter's change, over all layers. model: where the base model is now,
    if it moved. moments: of the base model, from `octavo calibrate --moments`: the merged weights are then rounded with
    compensation, not to nearest. scheme, scale_format: default those of the run. activation: what the served linears
    do to their inputs; default what the run trained with, or for `none` the scheme's own.
    """

    run: Path
    out: Path
    merge: Literal["original", "dequantized", "none"] = "original"
    layout: Literal["ct", "native"] = "ct"
    scheme: str | None = None
    scale_format: str | None = None
    activation: str | None = None
    moments: Path | None = None
    model: str | None = None
    min_kept: float = pydantic.Field(0.9, ge=0, le=1)
    max_shard_size: int = pydantic.Field(5_000_000_000, ge=1)


class ExportReport(Report):
    """kept, output_cosine: over all layers together, weighted by the size of change and output; None: nothing to lose.

    kept_16bit: module -> why, for linears that stay in 16 bit. measured_on: the inputs of output_cosine. next: commands
    to serve the result.
    """

    out: str
    run: str
    merge: str
    scheme: str
    layout: str
    activation: str
    kept: float | None
    output_cosine: float | None
    measured_on: str
    layers: list[LayerKept]
    kept_16bit: dict[str, str]
    bytes_in: int
    bytes_out: int
    seconds: float
    next: list[str]
    warnings: list[str] = pydantic.Field(default_factory=list)


def export(config: ExportConfig) -> ExportReport:
    """Write `out`, all or nothing.

    CheckpointError: an unfinished run or a damaged adapter. MismatchError: the base model is not the run's.
    RefusedError: an adapter that is more than LoRA, a base that is FP8 already for merge `original`, or less than
    `min_kept` of the change left; then nothing is written.
    """
    started = time.monotonic()
    if config.moments and config.merge == "none":
        fix = "Leave --moments out: the adapter was trained beside a base rounded to nearest."
        raise ConfigError("merge 'none' with moments", got="nothing to round anew", fix=fix)
    run = RunFolder(config.run)
    run.require_finished()
    settings, policy = run.read_config(), run.read_policy()
    folder = resolve_model(config.model or _base_of(run))
    source = Checkpoint.open(folder)
    run.require_model(fingerprint(source))
    adapter = Adapter.open(run.adapter)
    is_fp8 = "quantization_config" in source.config
    if is_fp8 and config.merge == "original":
        raise RefusedError(
            f"merge 'original': the base {folder} is FP8 already, its original weights are not here",
            fix="Use --merge none to serve the adapter beside it, or --merge dequantized and look at what is kept.",
        )
    recipe = _recipe(config, settings, policy)
    scales = Scales.load(run.scales, model=source) if recipe.activation == "static" else None
    merge = Merge(source, {} if config.merge == "none" else adapter.match(source.shapes()), recipe, config.layout)
    merge.requantized_base = config.merge == "dequantized" and not is_fp8
    check_output(config.out, config.out)
    work = config.out.parent / f".{config.out.name}.octavo-export"
    if work.exists():
        shutil.rmtree(work)
    try:
        summary = _convert(config, source, work, recipe, merge, scales, is_fp8)
        _check(config, merge.survival)
        if config.merge == "none":
            shutil.copytree(run.adapter, work / "adapter")
        if config.out.exists():
            config.out.rmdir()
        os.replace(work, config.out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _report(config, recipe, policy, adapter, merge.survival, summary, time.monotonic() - started)


def _base_of(run: RunFolder) -> str:
    return str(run.read_manifest().options.get("model") or run.read_config().get("model"))


def _recipe(config: ExportConfig, settings: dict[str, object], policy: dict[str, dict[str, str]]) -> Recipe:
    """The run's recipe with this export's changes; what the policy keeps in 16 bit is skipped by name."""
    if not (config.scheme or settings.get("scheme")):
        raise CheckpointError(f"{config.run}: config.yaml names no scheme", fix="Give --scheme.")
    scheme = str(config.scheme or settings["scheme"])
    rounding = "compensated" if config.moments else "nearest"
    trained_with = str(settings["activation"])
    served = config.activation or (trained_with if trained_with != "none" else None)
    keep = tuple(name for name, entry in policy.items() if entry["precision"] == "16bit")
    scale_format = str(config.scale_format or settings["scale_format"])
    recipe = Recipe.named(scheme, activation=served, skip=keep, scale_format=scale_format, rounding=rounding)
    if recipe.activation == "static" and not RunFolder(config.run).scales.is_file():
        raise ConfigError("activation 'static'", got="a run without scales.json", need="calibrated scales")
    return recipe


def _convert(
    config: ExportConfig,
    source: Checkpoint,
    work: Path,
    recipe: Recipe,
    merge: Merge,
    scales: Scales | None,
    is_fp8: bool,
) -> ConversionSummary:
    moments = Moments.open(config.moments, model=source) if config.moments else None
    with progress("Exporting", source.nbytes, unit="bytes") as advance:
        return convert_checkpoint(
            source,
            work,
            recipe,
            layout=config.layout,
            quantize=Compensator(moments) if moments else round_nearest,
            calibrated=moments,
            slice_values=COMPENSATED_SLICE if moments else SLICE,
            edit=merge.edit if merge.pairs else None,
            observe=merge.observe if merge.pairs else None,
            scales=scales,
            dequantize=is_fp8,
            max_shard_size=config.max_shard_size,
            made_by=f"octavo export --merge {config.merge}",
            advance=advance,
        )


def _check(config: ExportConfig, survival: Survival) -> None:
    kept = survival.kept
    if kept is None or kept >= config.min_kept:
        return
    others = ["--merge none (serve the adapter beside the FP8 base: nothing is rounded)"]
    if config.merge == "dequantized":
        others.insert(0, "--merge original (add it to the original weights)")
    raise RefusedError(
        f"merging into FP8 would lose the adapter: {kept:.1%} of its change survives",
        need=f"at least {config.min_kept:.0%}",
        fix=f"Use {', or '.join(others)}; or accept it with --min-kept {max(0.0, kept - 0.01):.2f}.",
    )


def _report(
    config: ExportConfig,
    recipe: Recipe,
    policy: dict[str, dict[str, str]],
    adapter: Adapter,
    survival: Survival,
    summary: ConversionSummary,
    seconds: float,
) -> ExportReport:
    warnings = []
    if config.merge != "none" and survival.kept is None:
        warnings.append("the adapter changes nothing: it was never trained, or its matrices are zero")
    for text in warnings:
        logger().warning(text)
    linears = {o.module: o for o in summary.outcomes}
    return ExportReport(
        out=str(config.out),
        run=str(config.run),
        merge=config.merge,
        scheme=recipe.name,
        layout=config.layout,
        activation=recipe.activation,
        kept=survival.kept if config.merge != "none" else 1.0,
        output_cosine=survival.output_cosine if config.merge != "none" else 1.0,
        measured_on=MEASURED_ON if config.merge != "none" else "nothing: the adapter stays beside the base, unrounded",
        layers=survival.layers(),
        kept_16bit={m: policy.get(m, {}).get("reason") or o.reason for m, o in linears.items() if not o.rule},
        bytes_in=summary.bytes_in,
        bytes_out=summary.bytes_out,
        seconds=round(seconds, 3),
        next=_next(config, adapter),
        warnings=warnings,
    )


def _next(config: ExportConfig, adapter: Adapter) -> list[str]:
    verify = f"octavo verify {config.out} --engine all"
    if config.merge != "none":
        return [verify, f"octavo serve {config.out} --dry-run"]
    rank = next((rank for rank in LORA_RANKS if rank >= adapter.rank), adapter.rank)
    lora = f"--enable-lora --max-lora-rank {rank} --lora-modules {config.run.name}={config.out / 'adapter'}"
    return [verify, f"vllm serve {config.out} {lora}"]
