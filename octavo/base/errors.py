"""One tree of errors. Every message says what, got, need, next; `exit_code` is what the command line returns.

OctavoError                     anything Octavo says no to
├── InputError           2      what the user gave is wrong: paths, flags, values, data
│   ├── ConfigError      2      a setting: unknown key, wrong type, impossible combination
│   ├── CheckpointError  2      a file of a model: truncated, missing, wrong dtype or shape
│   ├── DataError        2      a dataset: unreadable, empty, too short
│   ├── MismatchError    2      two things that do not belong together: scales.json of another model
│   └── ShapeError       2      a tensor whose shape does not fit
├── RefusedError         1      a check says no: the result would be wrong
├── UnsupportedError     3      this machine cannot: no such backend, GPU or package
└── PreemptedError      75      asked to stop: what was done is saved, run it again to go on
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later


class OctavoError(Exception):
    """An error a user can act on.

    what: the thing at fault, with its name. got: what was found. need: what would be right. fix: the next step.
    """

    exit_code = 2
    code = "error"

    def __init__(self, what: str, *, got: str = "", need: str = "", fix: str = "") -> None:
        self.what, self.got, self.need, self.fix = what, got, need, fix
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The sentence without the remedy."""
        parts = [self.what]
        if self.got:
            parts.append(f"got {self.got}")
        if self.need:
            parts.append(f"need {self.need}")
        return "; ".join(parts)

    def __str__(self) -> str:
        return f"{self.message}. {self.fix}" if self.fix else self.message


class InputError(OctavoError):
    code = "bad-input"


class ConfigError(InputError):
    code = "bad-config"


class CheckpointError(InputError):
    code = "bad-checkpoint"


class DataError(InputError):
    code = "bad-data"


class MismatchError(InputError):
    code = "mismatch"


class ShapeError(InputError):
    code = "bad-shape"


class RefusedError(OctavoError):
    exit_code = 1
    code = "refused"


class UnsupportedError(OctavoError):
    exit_code = 3
    code = "unsupported"


class PreemptedError(OctavoError):
    exit_code = PREEMPTED
    code = "preempted"


def require_type(what: str, value: object, *kinds: type) -> None:
    """ConfigError unless `value`, the argument that `what` names, is of one of these types."""
    if not isinstance(value, kinds):
        need = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(what, got=type(value).__name__, need=need)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest known word, or the list of known words."""
    known = sorted(known)
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}."
