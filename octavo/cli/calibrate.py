"""octavo calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import DTYPES, SCHEMES, AsJson, ConfigFile, Data, Device, Model, Result, flags, option
from octavo.cli.render import pairs, table

if TYPE_CHECKING:
    from octavo.workflows.calibrate import CalibrateReport


def calibrate(
    ctx: typer.Context,
    model: Model = None,
    data: Data = None,
    out: Annotated[Path | None, option("The file to write.", "scales.json", "FILE")] = None,
    samples: Annotated[int | None, option("Samples to run.", 128)] = None,
    context: Annotated[int | None, option("Tokens of a sample.", 512)] = None,
    channels: Annotated[
        bool | None, option("Also write the range of every input channel.", True, None, "--channels/--no-channels")
    ] = None,
    moments: Annotated[Path | None, option("Folder for what compensated rounding needs.", None, "DIR")] = None,
    weighting: Annotated[str | None, option("Of the tokens in it.", "fisher", "none|fisher")] = None,
    sequential: Annotated[
        bool | None, option("Each block sees the rounded ones before it.", False, None, "--sequential/--no-sequential")
    ] = None,
    input_scale: Annotated[str | None, option("How static input scales are chosen.", "mse", "amax|mse")] = None,
    scheme: Annotated[str | None, option("Scheme of the error that ranks the layers.", "channel", SCHEMES)] = None,
    activation: Annotated[str | None, option("Activations of that error.", "token", "static|token|group128")] = None,
    device: Device = None,
    dtype: Annotated[str | None, option("Arithmetic.", "auto", DTYPES)] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Measure ranges of activations and KV cache and the error of every linear: writes scales.json."""
    from octavo.workflows.calibrate import CalibrateConfig
    from octavo.workflows.calibrate import calibrate as workflow

    report = workflow(CalibrateConfig.load(config, flags(ctx)))
    return Result(report, _lines(report))


def _lines(report: CalibrateReport) -> list[object]:
    facts = {
        "samples": f"{report.samples}, {report.tokens} tokens",
        "linears": f"{report.modules} measured, {len(report.unseen)} that no token reached",
        "KV cache": f"{report.kv_layers} layers",
        "written": report.out,
    }
    worst = table(("linear", "SQNR of its output, dB"), report.sensitive, title="Most sensitive")
    return [pairs(facts), worst]
