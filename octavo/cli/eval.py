"""octavo eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    Result,
    flags,
    option,
)
from octavo.cli.render import pairs


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
    activation: Annotated[str | None, option("By default what the folder says.", None, ACTIVATIONS)] = None,
    scales: Annotated[Path | None, option("scales.json of calibrate, for static activations.", None, "FILE")] = None,
    device: Device = None,
    dtype: Annotated[str | None, option("Arithmetic.", "float32", DTYPES)] = None,
    out: Annotated[Path | None, option("Also write the report here.", None, "FILE")] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Perplexity of a model and, against another, KL divergence and agreement on the same tokens."""
    from octavo.workflows.evaluate import EvaluateConfig
    from octavo.workflows.evaluate import evaluate as workflow

    report = workflow(EvaluateConfig.load(config, flags(ctx)))
    return Result(report, [pairs(dict(report.table())), report.verdict])
