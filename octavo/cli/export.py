"""octavo export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import ACTIVATIONS, SCHEMES, AsJson, ConfigFile, Device, Policy, Result, flags, option
from octavo.cli.render import layers_folded, not_for, number, pairs, size, table

if TYPE_CHECKING:
    from octavo.workflows.export import ExportReport

WORST = 5
FIGURES = ("of weights", "of outputs", "rounding error / change", "output cosine")


def export(
    ctx: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A finished run folder.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)] = None,
    merge: Annotated[str | None, option("Onto which weights.", "original", "original|dequantized|none")] = None,
    layout: Annotated[str | None, option("How the files spell it.", "ct", "ct|native")] = None,
    scheme: Annotated[str | None, option("By default the run's.", None, SCHEMES)] = None,
    scale_format: Annotated[str | None, option("By default the run's.", None, "fp32|po2")] = None,
    activation: Annotated[str | None, option("When served. By default as trained.", None, ACTIVATIONS)] = None,
    kv_cache: Annotated[str | None, option("fp8: store the run's KV scales.", "16bit", "16bit|fp8")] = None,
    method: Annotated[str | None, option("Of scales; the best for the rounding.", None, "absmax|mse|hessian")] = None,
    rounding: Annotated[
        str | None, option("By default compensated where moments or data are given.", None, "nearest|compensated")
    ] = None,
    moments: Annotated[Path | None, option("Of the base: what calibrate --moments wrote.", None, "DIR")] = None,
    data: Annotated[str | None, option("Instead of moments: text to calibrate on.", None, "DATA")] = None,
    samples: Annotated[int | None, option("Windows of that text.", 128)] = None,
    context: Annotated[int | None, option("Tokens of a window.", 512)] = None,
    weighting: Annotated[str | None, option("Of those tokens.", "fisher", "none|fisher")] = None,
    device: Device = None,
    policy: Policy = None,
    model: Annotated[str | None, option("The base model, if it moved.", None, "MODEL")] = None,
    min_kept: Annotated[float | None, option("Refuse below this share of the adapter's change.", 0.9)] = None,
    max_shard_size: Annotated[int | None, option("Of the files written, bytes.", 5_000_000_000)] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """A run to a checkpoint for serving, with the share of the adapter that survives FP8 rounding."""
    from octavo.workflows.export import ExportConfig
    from octavo.workflows.export import export as workflow

    report = workflow(ExportConfig.load(config, flags(ctx)))
    return Result(report, _lines(report))


def _survival(report: ExportReport) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [(report.rounding, *map(number, report.figures()))]
    if report.nearest:
        rows.append(("nearest", *map(number, report.nearest.figures())))
    return rows


def _lines(report: ExportReport) -> list[object]:
    facts = {
        "written": f"{report.out}, {size(report.bytes_out)}",
        "scheme": f"{report.scheme}, layout {report.layout}, activations {report.activation}",
        "measured on": report.measured_on,
    }
    lines: list[object] = [pairs(facts), table(("adapter kept", *FIGURES), _survival(report))]
    layers = [layer for layer in report.layers if layer.kept is not None]
    if worst := sorted(layers, key=lambda layer: layer.output_kept or layer.kept or 0)[:WORST]:
        lines.append(
            table(("least kept", *FIGURES), [(layer.module, *map(number, layer.figures())) for layer in worst])
        )
    kept = sorted({(layers_folded(name), reason) for name, reason in report.kept_16bit.items()})
    if kept:
        lines.append(table(("stays in 16 bit", "because"), kept))
    return [*lines, *not_for(report.engines), *(f"next: {line}" for line in report.next)]
