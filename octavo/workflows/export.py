"""export: a training run becomes a checkpoint for serving, and what the merge did to the adapter is measured.

Rounding to FP8 has a step of 6 % of a value; the change that LoRA makes is often 1 %. Merged onto weights that lie on
the FP8 grid already, most of it rounds away. Merged onto the original weights, rounding hits base and change alike, and
on average all of the change arrives. Either way the share that survives is measured, layer by layer.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import pydantic

from octavo.base.errors import CheckpointError, ConfigError, RefusedError, require_type
from octavo.base.log import logger, progress
from octavo.base.report import Config
from octavo.formats.recipe import Recipe
from octavo.integrations.hub import resolve_model
from octavo.integrations.loading import device_of
from octavo.integrations.moments import moments_for
from octavo.ops.rounding import SLICE as COMPENSATED_SLICE
from octavo.ops.rounding import Compensator, round_nearest
from octavo.store.adapter import Adapter
from octavo.store.conversion import ConversionSummary, convert_checkpoint
from octavo.store.folder import check_output
from octavo.store.manifest import fingerprint
from octavo.store.merge import Kept, LayerKept, Merge
from octavo.store.moments import Moments
from octavo.store.policy import Policy
from octavo.store.run import RunFolder
from octavo.store.scales import Scales
from octavo.store.slices import SLICE
from octavo.store.tensors import Checkpoint
from octavo.workflows.rules.planned import Foresight

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes


class ExportConfig(Config):
    """run: a finished run folder. out: the new checkpoint folder.

    merge: `original` adds the adapter to the original weights in float32 and quantizes the sum; `dequantized` adds it
    to the FP8 weights the run trained over; `none` writes the FP8 base and, in `adapter/`, the adapter beside it.
    min_kept: refuse below this share of the adapter's change, over all layers; of the outputs' change where inputs are
    known. model: where the base model is now, if it moved.
    moments: inputs of the base model, from `octavo calibrate --moments`; or data: a source of text to calibrate on
    (`samples` of `context` tokens, `weighting` as in calibrate, run on `device`). With either, survival is measured on
    outputs, and the merged weights are rounded with compensation unless rounding is `nearest`.
    method: of the merged weights' scales, as in quantize. scheme, scale_format: default those of the run.
    activation: what the served linears do to their inputs; default what the run trained with, or for `none` the
    scheme's own. kv_cache: `fp8` stores and declares the scales of keys and values that the run's scales.json holds,
    measured on the base model. policy: policy.json of the base model, from octavo tune, on top of the run's own.
    """

    run: Path
    out: Path
    merge: Literal["original", "dequantized", "none"] = "original"
    layout: Literal["ct", "native"] = "ct"
    scheme: str | None = None
    scale_format: str | None = None
    activation: str | None = None
    kv_cache: Literal["16bit", "fp8"] = "16bit"
    rounding: Literal["nearest", "compensated"] | None = None
    method: Literal["absmax", "mse", "hessian"] | None = None
    moments: Path | None = None
    data: str | None = None
    samples: int = pydantic.Field(128, ge=1)
    context: int = pydantic.Field(512, ge=2)
    weighting: Literal["none", "fisher"] = "fisher"
    device: str | None = None
    policy: Path | None = None
    model: str | None = None
    min_kept: float = pydantic.Field(0.9, ge=0, le=1)
    max_shard_size: int = pydantic.Field(5_000_000_000, ge=1)


class ExportReport(Kept):
    """Survival over all layers together (see `Kept`), weighted by the size of change and output; None: nothing to lose.

    rounding: of the merged weights. nearest: where that is `compensated`, what rounding to nearest would have kept.
    measured_on: the inputs of output figures. kept_16bit: module -> why, for linears that stay in 16 bit.
    engines: what each engine will say on SM90, `ok` or `error: CODE: message`. next: commands to serve the result.
    """

    out: str
    run: str
    merge: str
    scheme: str
    layout: str
    activation: str
    rounding: str
    nearest: Kept | None
    measured_on: str
    layers: list[LayerKept]
    kept_16bit: dict[str, str]
    bytes_in: int
    bytes_out: int
    seconds: float
    next: list[str]
    engines: dict[str, str] = pydantic.Field(default_factory=dict)
    warnings: list[str] = pydantic.Field(default_factory=list)


def export(config: ExportConfig) -> ExportReport:
    """Write `out`, all or nothing.

    CheckpointError: an unfinished run or a damaged adapter. MismatchError: the base model is not the run's.
    RefusedError: an adapter that is more than LoRA, a base that is FP8 already for merge `original`, or less than
    `min_kept` of the change left; then nothing is written.
    """
    require_type("export: config", config, ExportConfig)
    started = time.monotonic()
    if config.merge == "none" and (config.moments or config.data or config.rounding == "compensated"):
        fix = "Leave moments, data and rounding out: the adapter was trained beside a base rounded to nearest."
        raise ConfigError("merge 'none' with calibrated rounding", got="nothing to round anew", fix=fix)
    if config.method and config.merge != "original":
        fix = "Use --merge original, or leave --method out."
        raise ConfigError(f"method '{config.method}'", got="a base with the scales the run trained over", fix=fix)
    run = RunFolder(config.run)
    run.require_finished()
    settings = run.read_config()
    folder = resolve_model(config.model or _base_of(run))
    source = Checkpoint.open(folder)
    run.require_model(fingerprint(source))
    config = _as_trained(config, settings)
    adapter = Adapter.open(run.adapter)
    is_fp8 = "quantization_config" in source.config
    if is_fp8 and config.merge == "original":
        raise RefusedError(
            f"merge 'original': the base {folder} is FP8 already, its original weights are not here",
            fix="Use --merge none to serve the adapter beside it, or --merge dequantized and look at what is kept.",
        )
    policies = [run.read_policy(), *([Policy.load(config.policy, model=source)] if config.policy else [])]
    recipe = _recipe(config, settings, policies)
    needs_scales = recipe.activation == "static" or config.kv_cache == "fp8"
    scales = Scales.load(run.scales, model=source) if needs_scales else None
    pairs = {} if config.merge == "none" else adapter.match(source.shapes())
    check_output(config.out, config.out)
    work, foresight = config.out.parent / f".{config.out.name}.octavo-export", Foresight(source)
    if work.exists():
        shutil.rmtree(work)
    try:
        with _moments(config, source) as moments:
            merge = Merge(source, pairs, recipe, config.layout, moments)
            merge.requantized_base = config.merge == "dequantized" and not is_fp8
            summary = _convert(config, source, work, recipe, merge, scales, is_fp8, foresight)
        _check(config, merge.survival.total())
        if config.merge == "none":
            shutil.copytree(run.adapter, work / "adapter")
        if config.out.exists():
            config.out.rmdir()
        os.replace(work, config.out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report = _report(config, recipe, policies, adapter, merge, summary, time.monotonic() - started)
    return report.model_copy(update={"engines": foresight.engines})


def _as_trained(config: ExportConfig, settings: dict[str, Any]) -> ExportConfig:
    """With the moments that the run's base was rounded by, unless told otherwise. RefusedError for merges that would
    round the base in another way than the run did."""
    moments = settings.get("moments")
    if config.merge != "original" and (settings["mode"] == "fp8-aware" or moments):
        what = "trained over a base rounded with compensation" if moments else "trained through the rounding of the sum"
        raise RefusedError(f"merge '{config.merge}'", got=f"a run {what}", fix="Use --merge original.")
    if moments and not (config.moments or config.data or config.rounding == "nearest"):
        return config.model_copy(update={"moments": Path(moments)})
    return config


def _moments(config: ExportConfig, source: Checkpoint) -> AbstractContextManager[Moments | None]:
    """Second moments of the base model's inputs, where any were given or can be gathered."""
    config.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = "compensated" if config.moments or config.data else (config.rounding or "nearest")
    settings = config.model_dump(include={"moments", "data", "samples", "context", "weighting", "device"})
    return moments_for(wanted, source.folder, scratch=config.out.parent, **settings)


def _base_of(run: RunFolder) -> str:
    return str(run.read_manifest().options.get("model") or run.read_config().get("model"))


def _recipe(config: ExportConfig, settings: dict[str, object], policies: list[Policy]) -> Recipe:
    """The run's recipe with this export's changes and the exceptions of its policies, the last one on top."""
    if not (config.scheme or settings.get("scheme")):
        raise CheckpointError(f"{config.run}: config.yaml names no scheme", fix="Give --scheme.")
    scheme = str(config.scheme or settings["scheme"])
    rounding = config.rounding or ("compensated" if config.moments or config.data else "nearest")
    trained_with = str(settings["activation"])
    served = config.activation or (trained_with if trained_with != "none" else None)
    scale_format = str(config.scale_format or settings["scale_format"])
    recipe = Recipe.named(scheme, activation=served, scale_format=scale_format, rounding=rounding, method=config.method)
    for policy in policies:
        recipe = policy.apply(recipe)
    for what, needed in (
        ("activation 'static'", recipe.activation == "static"),
        ("kv_cache 'fp8'", config.kv_cache == "fp8"),
    ):
        if needed and not RunFolder(config.run).scales.is_file():
            raise ConfigError(what, got="a run without scales.json", need="calibrated scales")
    return recipe


def _convert(
    config: ExportConfig,
    source: Checkpoint,
    work: Path,
    recipe: Recipe,
    merge: Merge,
    scales: Scales | None,
    is_fp8: bool,
    foresight: Foresight,
) -> ConversionSummary:
    moments = merge.moments if recipe.compensated else None
    solve = Compensator(moments, device_of(config.device)) if moments else None
    with progress("Exporting", source.nbytes, unit="bytes") as advance:
        return convert_checkpoint(
            source,
            work,
            recipe,
            layout=config.layout,
            quantize=solve or round_nearest,
            together=solve.together if solve else None,
            calibrated=moments,
            slice_values=COMPENSATED_SLICE if moments else SLICE,
            edit=merge.edit if merge.pairs else None,
            observe=merge.observe if merge.pairs else None,
            scales=scales,
            kv_cache=config.kv_cache,
            examine=foresight,
            dequantize=is_fp8,
            max_shard_size=config.max_shard_size,
            made_by=f"octavo export --merge {config.merge}",
            advance=advance,
        )


def _check(config: ExportConfig, survival: Kept) -> None:
    kept = survival.kept if survival.output_kept is None else survival.output_kept
    if kept is None or kept >= config.min_kept:
        return
    others = ["--merge none (serve the adapter beside the FP8 base: nothing is rounded)"]
    if config.merge == "dequantized":
        others.insert(0, "--merge original (add it to the original weights)")
        if survival.output_kept is None:
            others.insert(1, "--data (calibrate and round with compensation)")
    raise RefusedError(
        f"merging into FP8 would lose the adapter: {kept:.1%} of its change survives",
        need=f"at least {config.min_kept:.0%}",
        fix=f"Use {', or '.join(others)}; or accept it with --min-kept {max(0.0, kept - 0.01):.2f}.",
    )


def _report(
    config: ExportConfig,
    recipe: Recipe,
    policies: list[Policy],
    adapter: Adapter,
    merge: Merge,
    summary: ConversionSummary,
    seconds: float,
) -> ExportReport:
    warnings = []
    nothing = config.merge == "none"
    total = Kept(kept=1.0, output_kept=1.0, output_cosine=1.0) if nothing else merge.survival.total()
    if total.kept is None:
        warnings.append("the adapter changes nothing: it was never trained, or its matrices are zero")
    for text in warnings:
        logger().warning(text)
    linears = {o.module: o for o in summary.outcomes}
    reasons = {name: entry.reason for policy in policies for name, entry in policy.exceptions() if entry.reason}
    return ExportReport(
        out=str(config.out),
        run=str(config.run),
        merge=config.merge,
        scheme=recipe.name,
        layout=config.layout,
        activation=recipe.activation,
        **total.model_dump(),
        rounding=recipe.rule.rounding,
        nearest=merge.nearest.total() if recipe.compensated else None,
        measured_on=_measured_on(merge.moments, nothing),
        layers=merge.survival.layers(),
        kept_16bit={m: reasons.get(m) or o.reason for m, o in linears.items() if not o.rule},
        bytes_in=summary.bytes_in,
        bytes_out=summary.bytes_out,
        seconds=round(seconds, 3),
        next=_next(config, adapter),
        warnings=warnings,
    )


def _measured_on(moments: Moments | None, nothing: bool) -> str:
    if nothing:
        return "nothing: the adapter stays beside the base, unrounded"
    if moments is None:
        return "weights alone: give moments or data to measure outputs"
    weighted = ", weighted by Fisher information" if moments.index.weighting == "fisher" else ""
    return f"{moments.index.tokens:,} calibration tokens{weighted}"


def _next(config: ExportConfig, adapter: Adapter) -> list[str]:
    verify = f"octavo verify {config.out} --engine all"
    if config.merge != "none":
        return [verify, f"octavo serve {config.out} --dry-run"]
    rank = next((rank for rank in LORA_RANKS if rank >= adapter.rank), adapter.rank)
    lora = f"--enable-lora --max-lora-rank {rank} --lora-modules {config.run.name}={config.out / 'adapter'}"
    return [verify, f"vllm serve {config.out} {lora}"]
