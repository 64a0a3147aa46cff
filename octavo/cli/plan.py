"""octavo plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import SCHEMES, AsJson, ConfigFile, Device, Model, Result, flags, option
from octavo.cli.render import pairs, table

if TYPE_CHECKING:
    from octavo.pipelines.trial_report import TrialReport
    from octavo.workflows.planner.report import Option, PlanReport

CHECKPOINTING = "auto|none|selective|full"
REASONS = 8  # rejected ways that are shown


def plan(
    ctx: typer.Context,
    model: Model = None,
    method: Annotated[str | None, option("What trains.", "lora", "lora|full")] = None,
    precision: Annotated[str | None, option("Of the base.", "auto", "auto|bf16|fp8")] = None,
    scheme: Annotated[str | None, option("Of FP8 scales.", "channel", SCHEMES)] = None,
    rank: Annotated[int | None, option("Of LoRA.", 16)] = None,
    target_modules: Annotated[list[str] | None, option("By default all linears.", None, "NAME")] = None,
    context: Annotated[int | None, option("Tokens of a sequence.", 1024)] = None,
    batch: Annotated[int | None, option("Sequences of an optimizer step, over all GPUs.", 8)] = None,
    checkpointing: Annotated[str | None, option("auto: none and full.", "auto", CHECKPOINTING)] = None,
    loss: Annotated[str | None, option("Of the head.", "tiled", "tiled|plain|liger")] = None,
    saved_fp8: Annotated[
        bool | None, option("Activations saved in FP8.", False, None, "--saved-fp8/--no-saved-fp8")
    ] = None,
    gpu: Annotated[list[str] | None, option("h200, l40s,rtx4090: GPUs that are yours.", None, "NAME")] = None,
    instance: Annotated[list[str] | None, option("'g7e.*,p5*'. By default all.", None, "GLOB")] = None,
    max_memory_per_gpu: Annotated[float | None, option("GiB.")] = None,
    max_gpus: Annotated[int | None, option("In all; several instances where it allows.")] = None,
    budget: Annotated[float | None, option("USD for the whole run.")] = None,
    deadline: Annotated[float | None, option("Hours for the whole run.")] = None,
    spot: Annotated[bool | None, option("Spot prices.", False, None, "--spot/--no-spot")] = None,
    prices: Annotated[Path | None, option("YAML: instance type, or GPU, to USD an hour.", None, "FILE")] = None,
    tokens: Annotated[str | None, option("Length of the run: 20M.")] = None,
    order: Annotated[str | None, option("What the best is best in.", "cost", "cost|time|tokens/s")] = None,
    top: Annotated[int | None, option("Rows.", 10)] = None,
    data: Annotated[str | None, option("For the run.yaml.", None, "DATA")] = None,
    out: Annotated[Path | None, option("For the run.yaml.", None, "DIR")] = None,
    write: Annotated[Path | None, option("Where to put the run.yaml.", None, "FILE")] = None,
    trial: Annotated[bool | None, option("Confirm it with real steps here.", False, None, "--trial/--no-trial")] = None,
    trial_seconds: Annotated[float | None, option("For one candidate.", 600.0)] = None,
    trial_processes: Annotated[int | None, option("GPUs of the trial.", 1)] = None,
    device: Device = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Which GPU, how many, batch, precision, memory, time and cost, before the money is spent."""
    from octavo.pipelines.plan import PlanJobConfig
    from octavo.pipelines.plan import plan as pipeline

    settings = PlanJobConfig.load(config, flags(ctx))
    job = pipeline(settings)
    report, found = job.plan, job.trial
    no = not report.options if found is None else found.micro_batch is None
    return Result(job, _lines(report, settings.write) + (_trial(found) if found else []), code=int(no))


def _lines(report: PlanReport, written: Path | None) -> list[object]:
    how = "safetensors headers" if report.from_headers else "formula"
    roles = ", ".join(f"{name} {count:,}" for name, count in sorted(report.by_role.items(), key=lambda i: -i[1]))
    lines: list[object] = [
        pairs(
            {
                "model": report.model,
                "parameters": f"{report.parameters:,} by {how}: {roles}",
                "trained": f"{report.trained:,} ({report.method})",
                "step": f"{report.batch} sequences of {report.context} tokens",
            }
        )
    ]
    if report.options:
        columns = _COLUMNS + (("hours", "USD") if report.steps else ("USD/Mtok",))
        for title, options in (("Best of each place", report.options), ("Not beaten in time and cost", report.pareto)):
            lines.append(table(columns, [_row(one) for one in options], title))
        lines += _detail(report.options[0])
    lines += _rejected(report)
    lines += [f"note: {note}" for note in report.notes]
    first = "" if written else "the same with --write run.yaml, then "
    return lines + ([f"next: {first}{report.command}"] if report.command else [])


_COLUMNS = ("where", "how", "GiB", "s/step", "MFU")


def _row(one: Option) -> list[object]:
    how = [one.precision, f"{one.micro_batch}x{one.accumulation}"]
    how += ["ckpt"] if one.checkpointing == "full" else [] if one.checkpointing == "none" else [one.checkpointing]
    how += [one.sharding] if one.gpus > 1 else []
    money = [_money(one.usd_per_million_tokens)] if one.hours is None else [f"{one.hours:.3g}", _money(one.cost_usd)]
    return [
        one.where,
        " ".join(how),
        f"{one.memory_gib:.0f}/{one.usable_gib:.0f}",
        f"{one.seconds_per_step:.3g}",
        f"{one.mfu:.0%}",
        *money,
    ]


def _detail(one: Option) -> list[object]:
    """Why the first option takes what it takes."""
    memory = ", ".join(f"{name} {size:.2f}" for name, size in sorted(one.terms_gib.items(), key=lambda i: -i[1]))
    time = ", ".join(f"{name} {seconds:.3g}" for name, seconds in one.parts_s.items() if seconds >= 0.001)
    low, high = one.seconds_range
    lines: list[object] = [
        f"memory of {one.where} at {one.instant}, GiB: {memory}",
        f"time of a step, {low:.3g} to {high:.3g} s ({one.rates} rates, {one.bound} bound): {time}",
    ]
    return lines + [f"note: {note}" for note in one.notes]


def _rejected(report: PlanReport) -> list[object]:
    """Each reason once, with all places that it holds for."""
    places: dict[tuple[str, str], list[str]] = {}
    for one in report.rejected:
        places.setdefault((one.what, one.reason), []).append(one.where)
    lines: list[object] = [
        f"not {', '.join((*where, what) if what else where)}: {reason}"
        for (what, reason), where in list(places.items())[:REASONS]
    ]
    if more := sum(len(where) for where in list(places.values())[REASONS:]):
        lines.append(f"and {more} more that do not fit: --json lists them")
    return lines


def _money(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _trial(found: TrialReport) -> list[object]:
    columns = ("micro x steps", "precision", "outcome", "predicted GiB", "measured GiB", "error %")
    rows = [
        (f"{t.micro_batch}x{t.accumulation}", t.precision, t.outcome, t.predicted_gib, t.measured_gib, t.error_percent)
        for t in found.tried
    ]
    lines: list[object] = [table(columns, rows, f"Trial on {found.device}, {found.processes} process(es)")]
    lines += [f"{t.micro_batch}x{t.accumulation}: {t.detail}" for t in found.tried if t.detail]
    if found.refined:
        lines.append("refined: " + ", ".join(f"{name} {value:.4g}" for name, value in found.refined.items()))
    said = "no micro-batch fits" if found.micro_batch is None else f"micro-batch {found.micro_batch} is confirmed"
    return [*lines, said]
