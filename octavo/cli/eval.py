"""octavo eval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import (
    ACTIVATIONS,
    DTYPES,
    SCHEMES,
    AsJson,
    ConfigFile,
    Data,
    Device,
    Model,
    Policy,
    Result,
    flags,
    option,
)
from octavo.cli.render import pairs, table

if TYPE_CHECKING:
    from octavo.workflows.evaluate import EvaluateReport

SHOWN = 10


def evaluate(
    ctx: typer.Context,
    model: Model = None,
    against: Annotated[
        str | None, option("The reference: another MODEL, usually the 16-bit one.", None, "MODEL")
    ] = None,
    data: Data = None,
    split: Annotated[str | None, option("Part of the data.", "eval", "eval|calibration|train")] = None,
    tokens: Annotated[int | None, option("Tokens at most.", 12288)] = None,
    context: Annotated[int | None, option("Tokens of a window.", 512)] = None,
    scheme: Annotated[str | None, option("Quantize MODEL while loading it.", "stored", f"stored|{SCHEMES}")] = None,
    scale_format: Annotated[str | None, option("Of that scheme.", "fp32", "fp32|po2")] = None,
    rounding: Annotated[str | None, option("Of that scheme.", "nearest", "nearest|compensated")] = None,
    moments: Annotated[Path | None, option("Of calibrate --moments, for compensated.", None, "DIR")] = None,
    calibration: Annotated[str | None, option("Instead of moments: text to calibrate on.", None, "DATA")] = None,
    samples: Annotated[int | None, option("Windows of that text.", 128)] = None,
    policy: Policy = None,
    activation: Annotated[str | None, option("By default what the folder says.", None, ACTIVATIONS)] = None,
    scales: Annotated[Path | None, option("scales.json of calibrate, for static activations.", None, "FILE")] = None,
    kv_cache: Annotated[str | None, option("Of MODEL; fp8: and is it safe?", "16bit", "16bit|fp8")] = None,
    kv_scale: Annotated[str | None, option("By default the folder's.", None, "one|calibrated|token-head")] = None,
    kv_query: Annotated[str | None, option("By default as vLLM rounds it.", None, "16bit|fp8")] = None,
    kv_limit: Annotated[float | None, option("The most KL that it may cost.", 0.01)] = None,
    attribution: Annotated[
        bool | None, option("What every layer costs alone.", False, None, "--attribution/--no-attribution")
    ] = None,
    attribution_tokens: Annotated[int | None, option("Tokens for that.", 1024)] = None,
    tasks: Annotated[list[str] | None, option("arithmetic, retrieval, or of lm-eval.", None, "TASK")] = None,
    task_items: Annotated[int | None, option("Items of a task at most.", 100)] = None,
    task_folder: Annotated[Path | None, option("More tasks of lm-eval, YAML.", None, "DIR")] = None,
    device: Device = None,
    dtype: Annotated[str | None, option("Arithmetic.", "float32", DTYPES)] = None,
    out: Annotated[Path | None, option("Also write the report here.", None, "FILE")] = None,
    page: Annotated[Path | None, option("Also write it as an HTML page with charts.", None, "FILE")] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Perplexity of a model and, against another, KL divergence and agreement on the same tokens."""
    from octavo.workflows.evaluate import EvaluateConfig
    from octavo.workflows.evaluate import evaluate as workflow

    report = workflow(EvaluateConfig.load(config, flags(ctx)))
    return Result(report, _lines(report))


def _lines(report: EvaluateReport) -> list[object]:
    from octavo.workflows.evaluate import TASK_COLUMNS

    lines: list[object] = [pairs(dict(report.table())), report.verdict]
    if report.attribution:
        rows = [(part.name, part.kl, part.greedy_changed) for part in report.attribution[:SHOWN]]
        lines.append(table(("alone in FP8", "KL", "other first token"), rows))
    if report.tasks:
        lines.append(table(TASK_COLUMNS, [tuple(task.model_dump().values()) for task in report.tasks]))
    if kv := report.kv_cache:
        layers = sorted((layer for layer in kv.layers if layer.kl is not None), key=lambda layer: -(layer.kl or 0))
        shown = [(layer.name, layer.kl, layer.greedy_changed, layer.sensitive) for layer in layers[:SHOWN]]
        if shown:
            lines.append(table(("KV cache of", "KL", "other first token", "sensitive"), shown))
        lines.append(f"FP8 KV cache, scale {kv.scale}, queries {kv.query}: {kv.verdict}. {kv.reason}.")
    return lines
