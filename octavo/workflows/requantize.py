"""octavo requantize: the same model, written as one engine on one GPU wants it. FP8 or 16 bit in, FP8 out.

What only has other names keeps its codes. What needs other codes is decoded exactly in float32 and rounded once more,
and the error that this adds is measured on every weight.
"""

from __future__ import annotations

import math
from pathlib import Path

import pydantic
import torch

from octavo.base.errors import ConfigError, did_you_mean, require_type
from octavo.base.hardware import caps_named
from octavo.base.log import progress
from octavo.base.report import Config, Report
from octavo.formats.reference import dequantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.integrations.hub import resolve_model
from octavo.ops.rounding import round_nearest
from octavo.store import schema
from octavo.store.conversion import ConversionSummary, check_paths, convert_checkpoint
from octavo.store.relayout import relayout
from octavo.store.tensors import Checkpoint
from octavo.workflows.rules.choosing import Option, choose
from octavo.workflows.rules.engine import Target
from octavo.workflows.rules.judge import ENGINES, parse_version

WORST = 5


class RequantizeConfig(Config):
    """model: a folder or a hub id, in FP8 or in 16 bit. out: a folder that does not exist yet.

    target: engine:gpu or engine:version:gpu, such as vllm:sm120, sglang:0.5.23:b200, transformers:cpu. tp:
    tensor-parallel size.
    """

    model: str
    out: Path
    target: str = ""
    tp: int = pydantic.Field(1, ge=1, le=1024)

    def parts(self) -> tuple[str, str, str]:
        """(engine, version, gpu); version "" for the newest known. ConfigError for what is unknown."""
        engine, *middle, gpu = self.target.split(":") if ":" in self.target else (self.target, "")
        if not gpu or len(middle) > 1:
            need = "ENGINE:GPU or ENGINE:VERSION:GPU, such as vllm:sm120"
            fix = "Give it with --for, or as `target` in the file."
            raise ConfigError("the target to requantize for", got=repr(self.target), need=need, fix=fix)
        if engine not in ENGINES:
            raise ConfigError(f"engine '{engine}' is unknown", fix=did_you_mean(engine, ENGINES))
        if middle and not parse_version(middle[0]):
            raise ConfigError(f"engine version '{middle[0]}'", need="a version number such as 0.33.0")
        caps_named(gpu)
        return engine, middle[0] if middle else "", gpu


class RequantizeReport(Report):
    """method: `relayout` (codes kept) or `quantize`. why: one line a choice. against: other options, with the reason.

    error_db: of the new weights against those of `model`, over all FP8 modules, dB; None: no code was changed, or every
    value is exact. worst: the modules with the lowest. lost_keys: of the old quantization_config, those that the new
    one has no place for.
    """

    model: str
    out: str
    target: str
    tp: int
    method: str
    scheme: str
    layout: str
    scale_format: str
    kernel: str
    mode: str
    why: list[str]
    against: dict[str, str]
    error_db: float | None
    worst: dict[str, float]
    kept_16bit: dict[str, str]
    lost_keys: list[str]
    quantized: int
    bytes_in: int
    bytes_out: int
    seconds: float


class _Error:
    """Observes a conversion: energies of the weights and of what rounding changed, by module."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def observe(self, module: str, start: int, before: torch.Tensor, after: ScaledTensor) -> None:
        values = before.float()
        signal, noise = self.sums.get(module, (0.0, 0.0))
        signal += float(values.square().sum(dtype=torch.float64))
        noise += float((dequantize_ref(after) - values).square().sum(dtype=torch.float64))
        self.sums[module] = signal, noise

    def total(self) -> float | None:
        return _db(sum(s for s, _ in self.sums.values()), sum(n for _, n in self.sums.values()))

    def worst(self) -> dict[str, float]:
        found = {module: db for module, sums in self.sums.items() if (db := _db(*sums)) is not None}
        return dict(sorted(found.items(), key=lambda item: item[1])[:WORST])


def _db(signal: float, noise: float) -> float | None:
    return round(10 * math.log10(signal / noise), 2) if signal and noise else None


def requantize(config: RequantizeConfig) -> RequantizeReport:
    """Choose, convert, and say why. RefusedError (exit 1) when no way of writing it would load there."""
    require_type("requantize: config", config, RequantizeConfig)
    require_type("requantize: config", config, RequantizeConfig)
    engine, version, gpu = config.parts()
    version = version or ENGINES[engine].NEWEST
    target = Target(engine, parse_version(version), caps_named(gpu).sm, config.tp)
    source = Checkpoint.open(resolve_model(config.model))
    check_paths(source.folder, config.out)
    best, against = choose(source, target)
    error = _Error()
    with progress(f"Requantizing {source.folder.name}", source.nbytes, unit="bytes") as advance:
        if best.recipe is None:
            made_by = f"octavo requantize --for {config.target}"
            summary = relayout(source, config.out, best.layout, made_by=made_by, advance=advance)
        else:
            summary = convert_checkpoint(
                source,
                config.out,
                best.recipe,
                layout=best.layout,
                quantize=round_nearest,
                observe=error.observe,
                dequantize=True,
                made_by=f"octavo requantize --for {config.target}",
                advance=advance,
            )
    return _report(config, source, best, against, error, summary)


def _report(
    config: RequantizeConfig,
    source: Checkpoint,
    best: Option,
    against: dict[str, str],
    error: _Error,
    summary: ConversionSummary,
) -> RequantizeReport:
    kept = {o.module: o.reason for o in summary.outcomes if not o.rule and o.role in ("linear", "expert")}
    return RequantizeReport(
        model=config.model,
        out=str(summary.out),
        target=config.target,
        tp=config.tp,
        method="relayout" if best.recipe is None else "quantize",
        scheme=best.scheme,
        layout=best.layout,
        scale_format=_scale_format(best),
        kernel=best.judgement.kernel,
        mode=best.mode,
        why=_why(config, source, best, against),
        against=against,
        error_db=error.total(),
        worst=error.worst(),
        kept_16bit=kept,
        lost_keys=summary.lost_keys,
        quantized=len(summary.quantized),
        bytes_in=summary.bytes_in,
        bytes_out=summary.bytes_out,
        seconds=round(summary.seconds, 3),
    )


def _scale_format(best: Option) -> str:
    return "as stored" if best.recipe is None else best.recipe.rule.scale_format


def _why(config: RequantizeConfig, source: Checkpoint, best: Option, against: dict[str, str]) -> list[str]:
    """Method, scheme, layout, scale format: each with its reason."""
    stored = schema.stored_quantization(source)
    rivals = {name: reason for name, reason in against.items() if not name.endswith("experts in 16 bit")}
    other = {name: reason for name, reason in rivals.items() if not name.startswith(best.scheme)}
    layouts = [(n, r) for n, r in rivals.items() if n.startswith(best.scheme) and f" {best.layout}" not in n]
    rival = next(iter(other.items()), None)
    scheme = f"scheme {best.scheme}: {best.judgement.kernel} ({best.mode}) on {config.target}"
    scheme += f"; not {rival[0]}: {rival[1]}" if rival else ""
    layout = f"layout {best.layout}: "
    layout += f"not {layouts[0][0]}: {layouts[0][1]}" if layouts else "the only one that holds it"
    if best.recipe is None:
        method = "method relayout: codes and scales stay, bit for bit"
        format_ = "scale format as stored: the kernel multiplies by the scales as they are"
    else:
        method = f"method quantize: {'decoded exactly and rounded once more' if stored else 'from 16 bit'}"
        format_ = f"scale format {best.recipe.rule.scale_format}: "
        format_ += "the kernel rounds block scales to powers of two when it loads" if best.rounds else "exact scales"
    return [method, scheme, layout, format_]
