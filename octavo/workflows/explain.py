"""explain: what an error text of an engine means, and what to run next."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from pydantic import Field

from octavo.base.errors import require_type
from octavo.base.report import Config, Report
from octavo.workflows.rules.errors import KnownError
from octavo.workflows.rules.errors_other import OTHER_ERRORS
from octavo.workflows.rules.errors_vllm import VLLM_ERRORS

KNOWN_ERRORS = (*VLLM_ERRORS, *OTHER_ERRORS)
NEAREST = 3
# Longer texts are logs: what counts stands near the end, and a pattern must not search megabytes.
LONGEST = 20_000


class ExplainConfig(Config):
    """text: an error message, a line of a log, or a whole traceback."""

    text: str = Field(min_length=1)


class Explanation(Report):
    """source: who prints it. error: the text as it is known. cause, fix: what it means and the next step."""

    key: str
    source: str
    error: str
    cause: str
    fix: str


class ExplainReport(Report):
    """known: whether any text matched. explanations: the matches, best first, or the three nearest texts."""

    known: bool
    explanations: list[Explanation]


def explain(config: ExplainConfig | str) -> ExplainReport:
    """Match a text against the known errors. Of several matches the one that covers most of the text comes first."""
    require_type("explain: config", config, ExplainConfig, str)
    text = config if isinstance(config, str) else config.text
    text = " ".join(text[-LONGEST:].split())
    matches = [(match, error) for error in KNOWN_ERRORS if (match := error.compiled.search(text))]
    if matches:
        matches.sort(key=lambda found: -len(found[0].group()))
        return ExplainReport(known=True, explanations=[_explanation(error) for _, error in matches[:NEAREST]])
    ranked = sorted(KNOWN_ERRORS, key=lambda error: -_likeness(text, error))
    return ExplainReport(known=False, explanations=[_explanation(error) for error in ranked[:NEAREST]])


def _explanation(error: KnownError) -> Explanation:
    return Explanation(key=error.key, source=error.source, error=error.example, cause=error.cause, fix=error.fix)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z][a-z0-9]+", text.lower()))


def _likeness(text: str, error: KnownError) -> float:
    """Shared words first, then the order of letters."""
    mine, theirs = _words(text), _words(f"{error.source} {error.example} {error.cause}")
    shared = len(mine & theirs) / max(len(mine), 1)
    order = SequenceMatcher(None, text[-300:].lower(), error.example.lower(), autojunk=False).quick_ratio()
    return shared + 0.3 * order
