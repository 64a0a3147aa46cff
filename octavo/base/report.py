"""Config in, Report out: the two bases of every workflow, and how they reach the disk."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Self

import pydantic

from octavo.base.errors import ConfigError, did_you_mean

# What reading a text file raises. Bad UTF-8, bad JSON and numbers of thousands of digits are ValueErrors.
UNREADABLE = (OSError, ValueError, RecursionError)


class Config(pydantic.BaseModel):
    """What a workflow takes. Frozen; unknown keys are errors that name the nearest known key."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "") -> Self:
        """Build from plain values (flags, YAML). `source` names where they came from in the error."""
        try:
            return cls(**values)
        except pydantic.ValidationError as error:
            raise config_error(error, set(cls.model_fields), source or cls.__name__) from None

    @classmethod
    def load(cls, path: Path | None, flags: dict[str, Any] | None = None) -> Self:
        """A YAML file underneath, flags that are not None on top."""
        values = read_yaml(path) if path else {}
        values.update({k: v for k, v in (flags or {}).items() if v is not None})
        return cls.parse(values, str(path) if path else "command line")


class Report(pydantic.BaseModel):
    """What a workflow returns: the same record for Python, for `--json` and on disk."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def to_json(self) -> str:
        """One line of JSON. NaN and Infinity become null: they are not JSON."""
        return self.model_dump_json()

    def write(self, path: Path) -> None:
        """Write as indented JSON, atomically."""
        atomic_write(path, self.model_dump_json(indent=2).encode() + b"\n")


def config_error(error: pydantic.ValidationError, known: set[str], source: str) -> ConfigError:
    """Pydantic's first complaint, in our words."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{source}: unknown key '{key}'", fix=did_you_mean(key, known))
    if first["type"] == "missing":
        return ConfigError(f"{source}: '{key}' is missing", fix=f"Give {key}.")
    return ConfigError(f"{source}: {key}: {first['msg']}", got=repr(first.get("input")))


def check_regular(path: Path) -> None:
    """OSError for what is there and is no file: opening a pipe would wait for ever."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_json(path: Path, *, unique: bool = False) -> Any:
    """The value in a JSON file; else one of UNREADABLE, FileNotFoundError among them. unique: no key may come twice."""
    check_regular(path)
    return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once if unique else None)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"'{key}' is there twice")
        found[key] = value
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, or a ConfigError that names file and line."""
    import yaml

    try:
        check_regular(path)
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", fix="Check the path.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}", got="a folder", need="a YAML file of settings") from None
    except (*UNREADABLE, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable YAML", got=" ".join(str(error).split())) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(k, str) for k in values):
        raise ConfigError(f"{path}", got=type(values).__name__, need="a mapping of names to values")
    return values


def atomic_write(path: Path, data: bytes) -> None:
    """Temporary file beside the target, fsync, rename, fsync the folder: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes 0600
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that a rename inside it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
