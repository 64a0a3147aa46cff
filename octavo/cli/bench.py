"""octavo bench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import AsJson, ConfigFile, Result, flags, option
from octavo.cli.render import pairs, table

if TYPE_CHECKING:
    from octavo.workflows.bench import BenchReport


def bench(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="w8a16|decode|kv|gemm|lora", help="What to measure.")] = None,
    quick: Annotated[bool | None, option("One size of each.", False)] = None,
    layers: Annotated[int | None, option("Of the model that decodes or trains; 0 for all of it.", 0)] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Measure on this GPU what the documentation claims; results are checked first."""
    from octavo.workflows.bench import BenchConfig
    from octavo.workflows.bench import bench as workflow

    report = workflow(BenchConfig.load(config, flags(ctx)))
    return Result(report, _lines(report))


def _lines(report: BenchReport) -> list[object]:
    kinds: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in report.rows:
        kinds.setdefault(tuple(row), []).append(tuple(_shown(value) for value in row.values()))
    checked = ", ".join(f"{name} {db:.1f} dB" for name, db in report.checked.items())
    tables: list[object] = [table(names, rows) for names, rows in kinds.items()]
    return [pairs(report.machine), f"checked first, the least of all cases: {checked}", *tables]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "" if value is None else str(value)
