"""The manifest of a snapshot: written last, so that its presence says that all else is there; sealed by its hash."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, Self

import pydantic

from octavo.base.errors import CheckpointError
from octavo.base.report import UNREADABLE, Report, read_json

NAME = "manifest.json"
SCHEMA = 1
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def check_run(name: Any) -> str:
    """The name of a run, which becomes part of the names of folders that are deleted. ValueError for another text."""
    if not isinstance(name, str) or not _RUN.fullmatch(name):
        raise ValueError(f"run {name!r} is no name of a run")
    return name


class FileRecord(Report):
    """size: bytes. sha256: one per block of files.BLOCK bytes; of a smaller file, simply its sha256."""

    size: int
    sha256: tuple[str, ...]


class SnapshotManifest(Report):
    """step: optimizer steps taken. run: whose it is; a resumed run keeps the name. world: ranks that wrote it.

    kind: `full` continues the run; `adapter` holds the trained weights alone. base: fingerprint of the frozen model.
    """

    schema_version: int = SCHEMA
    step: int
    run: str
    kind: Literal["full", "adapter"]
    world: int = 1
    base: str = ""
    files: dict[str, FileRecord] = pydantic.Field(default_factory=dict)

    def sealed(self) -> bytes:
        body = self.model_dump(mode="json")
        return json.dumps({"sha256": _seal(body), "snapshot": body}, indent=1).encode() + b"\n"

    @classmethod
    def unsealed(cls, document: Any, where: str) -> Self:
        """CheckpointError for anything but what `sealed` wrote, to the bit."""
        try:
            body = document["snapshot"]
            if document["sha256"] != _seal(body):
                raise ValueError("its contents do not match its checksum")
            if body["schema_version"] != SCHEMA:
                raise ValueError(f"schema_version {body['schema_version']}, this Octavo reads {SCHEMA}")
            manifest = cls.model_validate(body)
            check_run(manifest.run)
            for name in manifest.files:
                if not _FILE.fullmatch(name) or name == NAME:  # the seal is no secret: anyone can write one
                    raise ValueError(f"{name!r} is no name of a file of a snapshot")
            return manifest
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is no manifest", got=" ".join(str(error).split())[:200]) from None

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / NAME
        try:
            document = read_json(path)
        except UNREADABLE as error:
            raise CheckpointError(f"{path} is not readable", got=" ".join(str(error).split())[:200]) from None
        return cls.unsealed(document, str(path))

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.files.values())


def _seal(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
