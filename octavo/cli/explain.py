"""octavo explain."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import AsJson, Result, flags

if TYPE_CHECKING:
    from octavo.workflows.explain import ExplainReport


def explain(
    ctx: typer.Context,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="An error or a log; - reads stdin.", show_default=False)
    ] = None,
    json: AsJson = False,
) -> Result:
    """Cause and remedy of an error that an engine printed about FP8.

    Exits with 1 when nothing is known about the text; what comes nearest is shown.
    """
    from octavo.workflows.explain import ExplainConfig
    from octavo.workflows.explain import explain as workflow

    given = flags(ctx)
    if text == "-":
        given["text"] = sys.stdin.read()
    report = workflow(ExplainConfig.load(None, given))
    return Result(report, _lines(report), code=0 if report.known else 1)


def _lines(report: ExplainReport) -> list[object]:
    lines: list[object] = [] if report.known else ["Nothing is known about this text. Nearest:"]
    for found in report.explanations:
        lines += [f"{found.source}: {found.error}", f"  cause: {found.cause}", f"  next:  {found.fix}", ""]
    return lines
