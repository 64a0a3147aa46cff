"""Every OCTAVO_* variable, read once. Nothing else in the package looks at the environment for its own settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from octavo.base.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Env:
    """The settings of this process. Field `cache_dir` is read from OCTAVO_CACHE_DIR, and so on.

    cache_dir: where models and compiled kernels are kept; private to the user.
    log: a level of the logging module: DEBUG, INFO, WARNING, ERROR.
    arch: force kernels to be built for this compute capability, e.g. 80; empty means the device at hand.
    debug_sync: check for errors after every kernel launch.
    """

    cache_dir: Path = Path("~/.cache/octavo")
    log: str = "WARNING"
    arch: str = ""
    debug_sync: bool = False


@cache
def env() -> Env:
    """Read the environment, once per process. An OCTAVO_ variable nobody knows is an error, not a silent no-op."""
    known = {f"OCTAVO_{f.name.upper()}": f for f in fields(Env)}
    values: dict[str, object] = {}
    for key, text in os.environ.items():
        if not key.startswith("OCTAVO_") or key.startswith("OCTAVO_TEST_"):
            continue
        if key not in known:
            raise ConfigError(f"environment variable {key} is unknown", fix=did_you_mean(key, known))
        values[known[key].name] = _parse(key, text, known[key].default)
    result = Env(**values)  # type: ignore[arg-type]
    return Env(**{**result.__dict__, "cache_dir": result.cache_dir.expanduser()})


def _parse(key: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text not in ("0", "1"):
            raise ConfigError(f"environment variable {key}", got=repr(text), need="0 or 1")
        return text == "1"
    return Path(text) if isinstance(default, Path) else text
