"""What every command shares: the options `--config` and `--json`, flags out of a context, and a Result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    typer.Option("--json", help="The last line of stdout is the result as JSON; all else goes to stderr."),
]

# Parameters of a command that are not settings of its workflow.
NOT_SETTINGS = frozenset({"config", "json", "dry_run"})


@dataclass(frozen=True)
class Result:
    """What a command hands back to be shown.

    report: the JSON document. lines: for people, strings printed as they are or rich renderables. code: the exit code.
    then: called once all is shown.
    """

    report: Report
    lines: Sequence[object] = ()
    code: int = 0
    then: Callable[[], None] | None = None


def flags(ctx: typer.Context) -> dict[str, Any]:
    """The settings given on the command line, by name; what was not given is left out, so that the file decides."""
    given = {name: value for name, value in ctx.params.items() if name not in NOT_SETTINGS}
    return {name: value for name, value in given.items() if value is not None and value not in ((), [])}


def option(text: str, default: object = None, metavar: str | None = None, *names: str) -> Any:
    """A flag for a field of the Config. default: the Config's, for the help only; a test compares the two."""
    shown: bool | str = False if default is None else str(default)
    return typer.Option(*names, help=text, metavar=metavar, show_default=shown)


# Fields that several Configs share, so that one flag means one thing.
SCHEMES = "channel|block128|tensor"
ACTIVATIONS = "none|static|token|group128"
DTYPES = "auto|float32|bfloat16|float16"
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="A folder, a hub id, or demo.", show_default=False)]
Data = Annotated[
    str | None, option("Text, JSON lines or Parquet file, a folder, a hub dataset, or demo.", "demo", "DATA")
]
Policy = Annotated[Path | None, option("policy.json of this model, from octavo tune.", None, "FILE")]
Device = Annotated[str | None, option("cpu, cuda, cuda:1; by default the first GPU, else the CPU.")]
