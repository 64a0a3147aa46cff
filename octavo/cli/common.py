"""What every command shares: the options `--config` and `--json`, flags out of a context, and a Result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from octavo.base.report import Report

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML with the same names as the flags; flags win."),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="The last line of stdout is one JSON document; everything else goes to stderr."),
]

# Parameters of a command that are not settings of its workflow.
NOT_SETTINGS = frozenset({"config", "json"})


@dataclass(frozen=True)
class Result:
    """What a command hands back to be shown.

    report: the JSON document. lines: for people, strings printed as they are or rich renderables. code: the exit code.
    """

    report: Report
    lines: Sequence[object] = ()
    code: int = 0


def flags(ctx: typer.Context) -> dict[str, Any]:
    """The settings given on the command line, by name; what was not given is left out, so that the file decides."""
    given = {name: value for name, value in ctx.params.items() if name not in NOT_SETTINGS}
    return {name: value for name, value in given.items() if value is not None and value not in ((), [])}
