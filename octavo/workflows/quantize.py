"""octavo quantize: any safetensors checkpoint in 16 or 32 bit -> an FP8 one that engines load. Needs no GPU."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import pydantic

from octavo.base.errors import ConfigError, did_you_mean, require_type
from octavo.base.log import progress
from octavo.base.report import Config, Report
from octavo.formats.recipe import ACTIVATIONS, PRESETS, Recipe
from octavo.formats.rule import ROUNDINGS
from octavo.formats.scale import SCALE_FORMATS, SCALE_METHODS
from octavo.integrations.hub import resolve_model
from octavo.integrations.loading import device_of
from octavo.integrations.moments import moments_for
from octavo.ops.rounding import SLICE as COMPENSATED_SLICE
from octavo.ops.rounding import Compensator, round_nearest
from octavo.store.conversion import ConversionSummary, check_paths, convert_checkpoint
from octavo.store.moments import Moments
from octavo.store.policy import Policy
from octavo.store.relayout import relayout
from octavo.store.scales import Scales
from octavo.store.schema import LAYOUTS
from octavo.store.slices import SLICE
from octavo.store.tensors import Checkpoint
from octavo.workflows.rules.planned import Foresight

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class QuantizeConfig(Config):
    """model: a folder, a hub id, or demo. out: a folder that does not exist yet.

    scheme: channel (default), block128 or tensor. layout: ct (compressed-tensors) or native. scale_format: fp32 or po2.
    rounding: nearest, or compensated, which needs `moments` (what octavo calibrate --moments wrote) or `data`, a
    source of text to calibrate on (`samples` of `context` tokens, `weighting` as in calibrate, run on `device`).
    method: of the weights' scales: absmax, mse (least error of the weights) or hessian (of the outputs, for compensated
    rounding, which takes it by default). activation: none, static, token or group128; the scheme's own when
    empty. skip: patterns of modules to keep in 16 bit: a full name, a glob, or `re:` and a regular expression.
    policy: policy.json of this model, from octavo tune: layers that stay in 16 bit or take another scheme.
    scales: scales.json, for static activations. kv_cache: `fp8` stores and declares its scales of keys and values.
    max_shard_size: of the output's files, such as 5GB. fp8_input: what to do with a model that is FP8 already: refuse,
    dequantize (and quantize anew), or relayout (rename only; scheme and the like are then the model's own).
    compat: `llmcompressor` reproduces that tool's bytes, for comparisons.
    """

    model: str
    out: Path
    scheme: str = "channel"
    layout: str = "ct"
    scale_format: str = "fp32"
    rounding: str = "nearest"
    method: str | None = None
    activation: str | None = None
    skip: tuple[str, ...] = ()
    policy: Path | None = None
    scales: Path | None = None
    kv_cache: Literal["16bit", "fp8"] = "16bit"
    moments: Path | None = None
    data: str | None = None
    samples: int = pydantic.Field(128, ge=1)
    context: int = pydantic.Field(512, ge=2)
    weighting: Literal["none", "fisher"] = "fisher"
    device: str | None = None
    max_shard_size: str = "5GB"
    fp8_input: Literal["refuse", "dequantize", "relayout"] = "refuse"
    compat: str | None = None

    def recipe(self) -> Recipe:
        """The recipe these settings name. ConfigError for an unknown word, with the nearest known one."""
        for what, value, known in (
            ("scheme", self.scheme, tuple(PRESETS)),
            ("layout", self.layout, LAYOUTS),
            ("scale format", self.scale_format, SCALE_FORMATS),
            ("rounding", self.rounding, ROUNDINGS),
            ("scale method", self.method, (*SCALE_METHODS, None)),
            ("activation mode", self.activation, (*ACTIVATIONS, None)),
        ):
            if value not in known:
                raise ConfigError(f"{what} '{value}' is unknown", fix=did_you_mean(str(value), filter(None, known)))
        rule = {"scale_format": self.scale_format, "rounding": self.rounding, "method": self.method}
        return Recipe.named(self.scheme, activation=self.activation, skip=self.skip, **rule)


class ModuleReport(Report):
    """One module. rule: how it was quantized, empty for 16 bit. reason: why, in words."""

    module: str
    rule: str
    role: str
    reason: str
    shape: tuple[int, ...]


class QuantizeReport(Report):
    """bytes_in, bytes_out: of tensors. quantized, kept: modules in FP8, and in 16 bit.

    fallbacks: modules that did not get the scheme's own rule though they are linears, each with its reason.
    resumed: shards that an earlier, killed run had finished. left_out: files too large to copy along.
    engines: what each engine will say on SM90: `ok`, or `error: CODE: message`.
    output_error: of compensated rounding, as a share of what nearest rounding makes of the calibration's outputs
    with the same scales.
    """

    model: str
    out: str
    scheme: str
    layout: str
    seconds: float
    bytes_in: int
    bytes_out: int
    quantized: int
    kept: int
    fallbacks: list[ModuleReport]
    modules: list[ModuleReport]
    files: list[str]
    engines: dict[str, str]
    output_error: float | None = None
    resumed: list[str] = pydantic.Field(default_factory=list)
    left_out: list[str] = pydantic.Field(default_factory=list)


def quantize_checkpoint(config: QuantizeConfig) -> QuantizeReport:
    """Convert, and say what became of every module and why.

    InputError and its kind (exit 2) for bad folders, settings or tensors; nothing half-written stays behind.
    """
    require_type("quantize_checkpoint: config", config, QuantizeConfig)
    config.recipe()  # an unknown word is an error before the model is looked for
    if config.kv_cache == "fp8" and config.fp8_input == "relayout":
        raise ConfigError("kv_cache 'fp8' with fp8_input 'relayout'", got="a change of names only", need="dequantize")
    size = parse_size(config.max_shard_size)
    source = Checkpoint.open(resolve_model(config.model))
    policy = Policy.load(config.policy, model=source) if config.policy else None
    config = policy.adopt(config) if policy else config
    recipe = policy.apply(config.recipe()) if policy else config.recipe()
    scales = Scales.load(config.scales, model=source) if config.scales else None
    foresight = Foresight(source)
    with _moments(config, source) as moments:
        solve = Compensator(moments, device_of(config.device)) if moments else None
        with progress(f"Quantizing {source.folder.name}", source.nbytes, unit="bytes") as advance:
            if config.fp8_input == "relayout":
                summary = relayout(
                    source, config.out, config.layout, max_shard_size=size, examine=foresight, advance=advance
                )
            else:
                summary = convert_checkpoint(
                    source,
                    config.out,
                    recipe,
                    layout=config.layout,
                    quantize=solve or round_nearest,
                    together=solve.together if solve else None,
                    scales=scales,
                    kv_cache=config.kv_cache,
                    calibrated=moments,
                    slice_values=COMPENSATED_SLICE if solve else SLICE,
                    examine=foresight,
                    dequantize=config.fp8_input == "dequantize",
                    compat=config.compat,
                    max_shard_size=size,
                    made_by="octavo quantize",
                    advance=advance,
                )
    return _report(config, summary, str(recipe.rule), solve, foresight.engines)


def _moments(config: QuantizeConfig, source: Checkpoint) -> AbstractContextManager[Moments | None]:
    """What compensated rounding needs: read from the folder given, or gathered now and thrown away afterwards."""
    if config.data is not None and config.moments is None and config.rounding != "nearest":
        check_paths(source.folder, config.out)  # before the long part
        config.out.parent.mkdir(parents=True, exist_ok=True)
    settings = config.model_dump(include={"moments", "data", "samples", "context", "weighting", "device"})
    return moments_for(config.rounding, source.folder, scratch=config.out.parent, **settings)


def parse_size(text: str) -> int:
    """`5GB`, `500 MB` or a plain number -> bytes. ConfigError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B|)\s*", text.upper())
    if match is None or float(match[1]) <= 0:
        raise ConfigError("max_shard_size", got=repr(text), need="a size such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def _report(
    config: QuantizeConfig,
    summary: ConversionSummary,
    rule: str,
    solve: Compensator | None,
    engines: dict[str, str],
) -> QuantizeReport:
    modules = [ModuleReport(**outcome.__dict__) for outcome in summary.outcomes]
    linears = [m for m in modules if m.role in ("linear", "expert")]
    fallbacks = [] if config.fp8_input == "relayout" else [m for m in linears if m.rule != rule]
    return QuantizeReport(
        model=config.model,
        out=str(summary.out),
        scheme=config.scheme,
        layout=config.layout,
        seconds=round(summary.seconds, 3),
        output_error=solve.error / solve.error_nearest if solve and solve.error_nearest else None,
        engines=engines,
        bytes_in=summary.bytes_in,
        bytes_out=summary.bytes_out,
        quantized=sum(bool(m.rule) for m in modules),
        kept=sum(not m.rule for m in modules),
        fallbacks=fallbacks,
        modules=modules,
        files=summary.files,
        resumed=summary.resumed,
        left_out=summary.left_out,
    )
