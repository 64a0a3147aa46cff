"""octavo tune."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import DTYPES, SCHEMES, AsJson, ConfigFile, Data, Device, Model, Result, flags, option
from octavo.cli.render import number, pairs, size, table

if TYPE_CHECKING:
    from octavo.pipelines.tune_report import TuneReport

SHOWN, POINTS = 20, 8


def tune(
    ctx: typer.Context,
    model: Model = None,
    budget: Annotated[str | None, option("The fewest bytes for this divergence.", None, "kl=0.003")] = None,
    keep: Annotated[str | None, option("At most this share of the bytes in 16 bit.", None, "2%")] = None,
    out: Annotated[Path | None, option("For policy.json and the report.", "octavo-tune", "DIR")] = None,
    scheme: Annotated[str | None, option("Of all other layers.", "channel", SCHEMES)] = None,
    alternatives: Annotated[list[str] | None, option("A layer may take this instead.", None, SCHEMES)] = None,
    layout: Annotated[str | None, option("Of the files to come.", "ct", "ct|native|memory")] = None,
    scale_format: Annotated[str | None, option("po2: powers of two.", "fp32", "fp32|po2")] = None,
    rounding: Annotated[str | None, option("Onto the FP8 grid.", "nearest", "nearest|compensated")] = None,
    method: Annotated[str | None, option("Of scales; the best for the rounding.", None, "absmax|mse|hessian")] = None,
    activation: Annotated[str | None, option("While measured.", "none", "none|token|group128")] = None,
    skip: Annotated[list[str] | None, option("Stays in 16 bit: a name, a glob, or re:...", None, "PATTERN")] = None,
    moments: Annotated[Path | None, option("For compensated; by default gathered now.", None, "DIR")] = None,
    data: Data = None,
    samples: Annotated[int | None, option("Windows of it for compensated rounding.", 128)] = None,
    tokens: Annotated[int | None, option("To measure on.", 8192)] = None,
    context: Annotated[int | None, option("Tokens of a window.", 512)] = None,
    checks: Annotated[int | None, option("Layers that are also measured alone.", 6)] = None,
    device: Device = None,
    dtype: Annotated[str | None, option("Arithmetic.", "auto", DTYPES)] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Which layers stay in 16 bit, for the least divergence per byte: writes policy.json.

    Exits with 1 when the budget is out of reach.
    """
    print("Loading ...", file=sys.stderr)
    from octavo.pipelines.tune import tune as pipeline
    from octavo.pipelines.tune_report import TuneConfig

    settings = TuneConfig.load(config, flags(ctx))
    report = pipeline(settings, say=lambda text: print(text, file=sys.stderr))
    return Result(report, _lines(report))


def _lines(report: TuneReport) -> list[object]:
    error = "" if report.kl_se is None else f" ± {report.kl_se:.2g}"
    facts = {
        "written": report.policy,
        "divergence": f"KL {number(report.kl)}{error}, with everything in FP8 {number(report.kl_fp8)}",
        "size": f"{size(report.bytes)}, {report.share:.2%} of it kept in 16 bit; all FP8 {size(report.bytes_fp8)}",
        "weighed": report.weighed,
    }
    lines: list[object] = [pairs(facts)]
    rows = [(e.unit, e.option, size(e.bytes), number(e.kl), "yes" if e.measured else "") for e in report.exceptions]
    if rows:
        lines.append(table(("layers", "take", "more bytes", "KL in FP8 alone", "measured"), rows[:SHOWN]))
    if len(rows) > SHOWN:
        lines.append(f"and {len(rows) - SHOWN} more in {report.policy}")
    step = max(1, len(report.curve) // POINTS)
    shown = [p for i, p in enumerate(report.curve) if p.measured or i % step == 0]
    points = [(size(p.bytes), f"{p.share:.1%}", number(p.kl), "yes" if p.measured else "") for p in shown]
    lines.append(table(("size", "in 16 bit", "KL", "measured"), points))
    return [*lines, *(f"next: {line}" for line in report.next)]
