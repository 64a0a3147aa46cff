"""Finding: one thing verify has to say. Findings: the list that grows while rules run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import pydantic

Severity = Literal["info", "warn", "error"]
Verdict = Literal["ok", "warn", "error"]

# The same defect in a thousand layers is one message with examples, not a thousand messages.
EXAMPLES = 20

REQUANTIZE = "Quantize the 16-bit model again: `octavo quantize MODEL OUT`."
# TARGET becomes the engine, GPU and tensor-parallel size that were asked about, DIR the folder.
WRITE_ANEW = "Other codes or scales: `octavo requantize DIR OUT --for TARGET`."
REPAIR = "Lossless repair: `octavo verify DIR --fix OUT`."
CONFIG = "Change config.json, or let `octavo verify DIR --fix OUT` do it."


class Finding(pydantic.BaseModel):
    """severity: `info` never changes the verdict. code: stable, for scripts. where: file, tensor or config key.

    engine: the engine it concerns, empty when it concerns the folder itself.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    severity: Severity
    code: str
    where: str
    message: str
    fix: str = ""
    engine: str = ""


class Findings:
    """Collects findings; of one code for one engine it keeps the first EXAMPLES and counts the rest.

    target: what `octavo requantize --for` would have to be told.
    """

    def __init__(self, engine: str = "", target: str = "") -> None:
        self.engine, self.target = engine, target or f"{engine or 'ENGINE'}:GPU"
        self._kept: list[Finding] = []
        self._seen: Counter[tuple[Severity, str]] = Counter()
        self._said: set[tuple[str, str, str]] = set()

    def add(self, severity: Severity, code: str, where: str, message: str, fix: str = "") -> None:
        """Nothing is added twice: same code, same place, same message."""
        if (code, where, message) in self._said:
            return
        self._said.add((code, where, message))
        self._seen[severity, code] += 1
        if self._seen[severity, code] <= EXAMPLES:
            fix = fix.replace("--for TARGET", f"--for {self.target}")
            finding = Finding(severity=severity, code=code, where=where, message=message, fix=fix, engine=self.engine)
            self._kept.append(finding)

    def error(self, code: str, where: str, message: str, fix: str = "") -> None:
        self.add("error", code, where, message, fix)

    def warn(self, code: str, where: str, message: str, fix: str = "") -> None:
        self.add("warn", code, where, message, fix)

    def info(self, code: str, where: str, message: str, fix: str = "") -> None:
        self.add("info", code, where, message, fix)

    def all(self) -> list[Finding]:
        """The findings, and for each code that ran over one line with the count of those left out."""
        more = []
        for (severity, code), count in self._seen.items():
            if count > EXAMPLES:
                text = f"{count - EXAMPLES} more like this"
                more.append(Finding(severity=severity, code=code, where="", message=text, engine=self.engine))
        return self._kept + more


def verdict(findings: Iterable[Finding]) -> Verdict:
    """The worst severity; `info` counts as ok."""
    severities = {finding.severity for finding in findings}
    return "error" if "error" in severities else "warn" if "warn" in severities else "ok"
