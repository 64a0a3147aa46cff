"""What people read goes to stderr: one logger, one progress bar. Stdout belongs to results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.base.env import env

Advance = Callable[[float], None]


def logger() -> logging.Logger:
    """The package's logger. Level from OCTAVO_LOG; handlers are the application's business."""
    log = logging.getLogger("octavo")
    if log.level == logging.NOTSET:
        log.setLevel(env().log)
    return log


@contextmanager
def progress(description: str, total: float | None = None, *, unit: str = "") -> Iterator[Advance]:
    """A progress bar on stderr: yields `advance(amount)`. Silent where stderr is no terminal, but for start and end.

    unit: "bytes" shows sizes and speed; anything else shows counts.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        logger().info(description)
        yield lambda amount: None
        return
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)
