"""Error texts of engines and libraries about FP8: what each means and what to run. Data; `explain` looks them up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class KnownError:
    """key: stable name. source: who prints it. pattern: regular expression, case does not count. example: as printed.

    cause: why it happens. fix: the next step, a command where there is one.
    """

    key: str
    source: str
    pattern: str
    example: str
    cause: str
    fix: str

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE)


BY_CHANNEL = "Use channel scales, which every engine and GPU takes: `octavo quantize MODEL OUT --scheme channel`."
VERIFY = "`octavo verify DIR --engine {} --gpu GPU --tp N` names the tensor."
AGAIN = "Quantize the 16-bit model again: `octavo quantize MODEL OUT`."
FIX_COPY = "`octavo verify DIR --fix OUT` writes a repaired copy."
