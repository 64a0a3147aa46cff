"""octavo quickstart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import AsJson, Result, flags, option
from octavo.cli.render import table

if TYPE_CHECKING:
    from octavo.pipelines.quickstart import QuickstartReport


def quickstart(
    ctx: typer.Context,
    out: Annotated[Path | None, option("Folder for all results.", "octavo-quickstart", "DIR")] = None,
    model: Annotated[str | None, option("A folder, a hub id, or demo.", "demo", "MODEL")] = None,
    json: AsJson = False,
) -> Result:
    """The whole main job on a small real model, on this machine: five minutes on two CPU cores."""
    print("Loading ...", file=sys.stderr)
    from octavo.pipelines.quickstart import QuickstartConfig
    from octavo.pipelines.quickstart import quickstart as pipeline

    report = pipeline(QuickstartConfig.load(None, flags(ctx)), say=lambda text: print(text, file=sys.stderr))
    return Result(report, _lines(report), code=1 if report.verify == "error" else 0)


def _lines(report: QuickstartReport) -> list[object]:
    def row(name: str, perplexity: float) -> tuple[str, str, str]:
        change = (perplexity / report.bf16_ppl - 1) * 100
        return (name, f"{perplexity:.3f}", f"{change:+.1f} %" if perplexity != report.bf16_ppl else "")

    rows = [
        row("16 bit", report.bf16_ppl),
        row("FP8, as served", report.fp8_ppl),
        row("fine-tuned over FP8", report.finetuned_ppl),
        row("exported checkpoint", report.exported_ppl),
    ]
    return [
        table(("model", "held-out perplexity", "against 16 bit"), rows),
        f"checkpoint: {report.exported_dir}, verify: {report.verify}, {report.seconds:.0f} s",
        "serve it:",
        report.serve_command,
    ]
