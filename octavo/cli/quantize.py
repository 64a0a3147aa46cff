"""octavo quantize."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import ACTIVATIONS, SCHEMES, AsJson, ConfigFile, Model, Policy, Result, flags, option
from octavo.cli.render import layers_folded, not_for, pairs, size, table

if TYPE_CHECKING:
    from octavo.workflows.quantize import QuantizeReport

SHOWN = 20


def quantize(
    ctx: typer.Context,
    model: Model = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)] = None,
    scheme: Annotated[str | None, option("How many values share a scale.", "channel", SCHEMES)] = None,
    layout: Annotated[str | None, option("How the files spell it.", "ct", "ct|native")] = None,
    scale_format: Annotated[str | None, option("po2: powers of two.", "fp32", "fp32|po2")] = None,
    rounding: Annotated[str | None, option("Onto the FP8 grid.", "nearest", "nearest|compensated")] = None,
    method: Annotated[str | None, option("Of scales; the best for the rounding.", None, "absmax|mse|hessian")] = None,
    activation: Annotated[str | None, option("When served. By default the scheme's.", None, ACTIVATIONS)] = None,
    skip: Annotated[list[str] | None, option("Stays in 16 bit: a name, a glob, or re:...", None, "PATTERN")] = None,
    policy: Policy = None,
    scales: Annotated[Path | None, option("scales.json, for static activations and KV cache.", None, "FILE")] = None,
    kv_cache: Annotated[str | None, option("fp8: store the scales in scales.json.", "16bit", "16bit|fp8")] = None,
    moments: Annotated[Path | None, option("For compensated: what calibrate --moments wrote.", None, "DIR")] = None,
    data: Annotated[str | None, option("For compensated: text to calibrate on now.", None, "DATA")] = None,
    samples: Annotated[int | None, option("Of that data.", "128")] = None,
    context: Annotated[int | None, option("Tokens of a sample.", "512")] = None,
    weighting: Annotated[str | None, option("Of its tokens.", "fisher", "none|fisher")] = None,
    device: Annotated[str | None, option("Where compensated rounding runs.", None)] = None,
    max_shard_size: Annotated[str | None, option("Of the files written.", "5GB", "SIZE")] = None,
    fp8_input: Annotated[
        str | None, option("What to do with FP8 weights.", "refuse", "refuse|dequantize|relayout")
    ] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Any safetensors checkpoint to FP8: streaming, no GPU, no model class needed."""
    from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint

    settings = QuantizeConfig.load(config, flags(ctx))
    report = quantize_checkpoint(settings)
    return Result(report, _lines(report, settings.kv_cache))


def _lines(report: QuantizeReport, kv_cache: str) -> list[object]:
    facts = {
        "written": report.out,
        "size": f"{size(report.bytes_in)} -> {size(report.bytes_out)}",
        "modules": f"{report.quantized} in FP8, {report.kept} in 16 bit",
        "seconds": report.seconds,
    }
    if kv_cache == "fp8":
        facts["KV cache"] = "scales for FP8 are stored"
    lines: list[object] = [pairs(facts)]
    kept = Counter(module.reason for module in report.modules if not module.rule)
    lines.append(table(("kept in 16 bit", "modules"), kept.most_common(SHOWN)))
    other = Counter((layers_folded(m.module), m.rule or "16 bit", m.reason) for m in report.fallbacks)
    if other:
        rows = [(count, *row) for row, count in other.most_common(SHOWN)]
        lines.append(table(("linears", "", "instead", "because"), rows, title="Not the scheme that was asked for"))
    lines += not_for(report.engines)
    lines += [f"not copied, too large: {name}" for name in report.left_out]
    return lines
