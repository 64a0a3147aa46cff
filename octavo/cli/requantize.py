"""octavo requantize."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import AsJson, ConfigFile, Model, Result, flags, option
from octavo.cli.render import layers_folded, pairs, size, table

if TYPE_CHECKING:
    from octavo.pipelines.requantize import RequantizedReport

SHOWN = 20


def requantize(
    ctx: typer.Context,
    model: Model = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)] = None,
    target: Annotated[
        str | None, option("ENGINE:GPU or ENGINE:VERSION:GPU, such as vllm:sm120.", None, "TARGET", "--for")
    ] = None,
    tp: Annotated[int | None, option("Tensor-parallel size.", 1)] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """The same model, FP8 or not, as one engine on one GPU wants it: scheme, layout and scales chosen, then verified.

    Exits with 1 when no way of writing it would load there, or the result does not verify.
    """
    from octavo.pipelines.requantize import requantize as pipeline
    from octavo.workflows.requantize import RequantizeConfig

    report = pipeline(RequantizeConfig.load(config, flags(ctx)))
    return Result(report, _lines(report), code=1 if report.verified.verdict == "error" else 0)


def _lines(report: RequantizedReport) -> list[object]:
    done = report.requantized
    error = "none: codes unchanged or exact" if done.error_db is None else f"{done.error_db:.1f} dB"
    facts = {
        "written": done.out,
        "size": f"{size(done.bytes_in)} -> {size(done.bytes_out)}",
        "FP8 modules": done.quantized,
        "error added": error,
        "seconds": done.seconds,
    }
    lines: list[object] = [*done.why, pairs(facts)]
    if done.against:
        lines.append(table(("instead of", "because"), list(done.against.items())))
    kept = Counter((layers_folded(module), reason) for module, reason in done.kept_16bit.items())
    if kept:
        rows = [(count, *row) for row, count in kept.most_common(SHOWN)]
        lines.append(table(("linears", "", "in 16 bit because"), rows))
    lines += [f"not carried over: {key}" for key in done.lost_keys]
    for finding in report.verified.findings:
        lines.append(f"{finding.severity}: {finding.code}: {finding.where}: {finding.message}")
    return [*lines, f"verdict for {done.target}: {report.verified.verdict}"]
