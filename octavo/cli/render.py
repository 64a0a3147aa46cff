"""Tables and numbers for people. Rich is imported on use, so that `octavo --help` does not pay for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> object:
    """A table; columns of numbers are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    grid = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(number(cell)) for cell in row))
    return grid


def pairs(values: Mapping[str, object]) -> object:
    """Names and values, two columns without a head."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in values.items():
        grid.add_row(Text(name, style="bold"), Text(number(value)))
    return grid


def number(value: object) -> str:
    """Four significant digits for a float, `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size(count: int) -> str:
    """Bytes in the unit people use: 269 MB, 14.2 GB."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def layers_folded(module: str) -> str:
    """`model.layers.7.mlp.up_proj` -> `model.layers.*.mlp.up_proj`: what all layers share is said once."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def not_for(engines: Mapping[str, str]) -> list[str]:
    """A line for each engine that will not load what was written, from `engines` of a report."""
    return [f"not for {engine}: {said.removeprefix('error: ')}" for engine, said in engines.items() if said != "ok"]
