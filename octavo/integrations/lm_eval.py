"""Tasks of lm-eval (EleutherAI's evaluation harness) on a model in memory: right or wrong, item by item."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, DataError, UnsupportedError
from octavo.base.packages import version_of
from octavo.integrations.hub import first_line
from octavo.integrations.measuring import Opened

# Metrics of an item that are 0 or 1, the one to report first.
RIGHT_OR_WRONG = ("exact_match", "acc_norm", "acc")


def require_harness(task: str) -> None:
    """UnsupportedError if lm-eval is not installed, before anything has taken time."""
    if version_of("lm-eval") is None:
        fix = "Run: pip install 'octavo[eval]'; the tasks arithmetic and retrieval need nothing."
        raise UnsupportedError(f"task '{task}' needs lm-eval", got="it is not installed", fix=fix)


def harness_answers(
    opened: Opened, tasks: Sequence[str], limit: int | None, folder: Path | None = None
) -> dict[str, list[bool]]:
    """Task -> what was right, in the order of its items. Tasks that stand for several give each of those.

    limit: items of a task at most. folder: of further task definitions (YAML), which may be all that is needed.
    UnsupportedError if lm-eval is not installed; ConfigError for a task that it does not know or that has no right and
    wrong; DataError where the task fails, which mostly means that its data cannot be had.
    """
    require_harness(tasks[0])
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with _quiet():
        manager = TaskManager(include_path=str(folder), include_defaults=False) if folder else TaskManager()
        if folder and not set(tasks) <= set(manager.all_tasks):  # its own 14,000 take long to read: only where needed
            manager = TaskManager(include_path=str(folder))
        if unknown := sorted(set(tasks) - set(manager.all_tasks)):
            fix = "lm-eval ls tasks lists them; --task-folder names a folder of your own."
            raise ConfigError(f"task '{unknown[0]}' is unknown to lm-eval {lm_eval.__version__}", fix=fix)
        model = HFLM(pretrained=opened.model, tokenizer=opened.tokenizer, batch_size=1)
        try:
            found = lm_eval.simple_evaluate(
                model=model, tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=True
            )
        except Exception as error:  # a task raises whatever its author wrote
            what = f"lm-eval could not run {', '.join(tasks)}"
            raise DataError(what, got=first_line(error), fix="Is its data here, or the hub within reach?") from error
    return {task: _right(task, samples) for task, samples in found["samples"].items()}


def _right(task: str, samples: list[dict[str, Any]]) -> list[bool]:
    """One answer per document: of the first filter where a task has several."""
    metric = next((name for name in RIGHT_OR_WRONG if samples and name in samples[0]), None)
    if metric is None:
        got = ", ".join(samples[0].get("metrics", ())) if samples else "no items"
        raise ConfigError(f"task '{task}' has no right and wrong", got=got, need=" or ".join(RIGHT_OR_WRONG))
    first: dict[int, bool] = {}
    for sample in samples:
        first.setdefault(int(sample["doc_id"]), bool(sample[metric]))
    return [first[document] for document in sorted(first)]


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval tells at length what it does, and warns that a model in memory was given, which is meant."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
