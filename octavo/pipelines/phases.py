"""A job in phases that survives being killed: its folder remembers what is finished; what is not is done again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, MismatchError
from octavo.base.report import UNREADABLE, atomic_write, read_json

Say = Callable[[str], None]
Facts = dict[str, Any]


def silent(text: str) -> None:
    """The `Say` of a caller that shows nothing."""


class Phases:
    """The phases of one job in `folder`, whose record is `folder/NAME.json`.

    total: how many there will be, for the headings.
    settings: what the results depend on; a folder made with others is refused, not mixed. Nothing is written before
    the first phase that has an output, or is done.
    """

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, Any], say: Say = silent, *, total: int = 0
    ) -> None:
        self.folder, self.say = folder, say
        self._begun, self._total = 0, total
        self._record = folder / f"{name}.json"
        self._settings = json.loads(json.dumps(dict(settings)))
        self._done: dict[str, Facts] = self._load()

    def _load(self) -> dict[str, Facts]:
        if not self._record.exists():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                fix = "Choose another --out, or remove it."
                raise ConfigError(f"{self.folder} exists and was not made by this command", fix=fix)
            return {}
        try:
            record = read_json(self._record)
            settings, phases = record["settings"], record["phases"]
            if not isinstance(settings, dict) or not isinstance(phases, dict):
                raise TypeError
            for phase in phases.values():
                times = phase["seconds"], phase["cpu_seconds"]
                if not isinstance(phase["facts"], dict) or not all(isinstance(t, int | float) for t in times):
                    raise TypeError
        except (*UNREADABLE, KeyError, TypeError):
            raise ConfigError(f"{self._record} is damaged", fix=f"Remove {self.folder} and start again.") from None
        for key in sorted({*settings, *self._settings}):
            if settings.get(key) != self._settings.get(key):
                raise MismatchError(
                    f"{self.folder} was made with {key} {settings.get(key)!r}",
                    got=repr(self._settings.get(key)),
                    fix="Choose another --out, or remove it.",
                )
        return phases

    @property
    def times(self) -> dict[str, tuple[float, float]]:
        """Phase -> (seconds, CPU seconds), also of phases finished by an earlier call."""
        return {name: (phase["seconds"], phase["cpu_seconds"]) for name, phase in self._done.items()}

    @property
    def seconds(self) -> float:
        return sum(wall for wall, _ in self.times.values())

    def run(self, name: str, title: str, work: Callable[[], Facts], output: Path | None = None) -> Facts:
        """Run `work` unless it is done; its result, JSON values, is remembered. output: what a killed run left of it
        is removed first; it lies inside the folder."""
        self._begun += 1
        heading = f"[{self._begun}/{self._total}] {title}" if self._total else title
        if name in self._done:
            self.say(f"{heading}: done before")
            return dict(self._done[name]["facts"])
        self.say(heading)
        if output is not None:
            _remove(output, inside=self.folder)
            self._save()  # before anything else is there: this folder is ours
        started, cpu = time.monotonic(), cpu_seconds()
        facts = json.loads(json.dumps(work()))
        self._done[name] = {
            "seconds": round(time.monotonic() - started, 2),
            "cpu_seconds": round(cpu_seconds() - cpu, 2),
            "facts": facts,
        }
        self._save()
        shown = {name: fact for name, fact in facts.items() if not isinstance(fact, dict | list)}
        self.say("      " + ", ".join([f"{self._done[name]['seconds']:.0f} s", *map(_fact, shown.items())]))
        return dict(facts)

    def _save(self) -> None:
        record = {"settings": self._settings, "phases": self._done}
        atomic_write(self._record, json.dumps(record, indent=2).encode() + b"\n")


def cpu_seconds() -> float:
    """CPU time of this process and the children it has waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _fact(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"


def _remove(path: Path, inside: Path) -> None:
    if not os.path.abspath(path).startswith(os.path.abspath(inside) + os.sep):
        raise ConfigError(f"{path} is not inside {inside}")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
