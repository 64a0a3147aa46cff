"""One snapshot through the protocol: data, checksums, manifest, rename. Each step is durable before the next begins.

Several ranks write into one folder of a shared file system. Each leaves a part file when its data is durable; rank 0
waits for all parts, writes the manifest and renames. No rank waits for another inside a collective.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from octavo.base.errors import CheckpointError, RefusedError
from octavo.base.report import UNREADABLE, read_json
from octavo.store.snapshot.files import Source
from octavo.store.snapshot.folder import ADAPTER, FULL, Keep, SnapshotFolder
from octavo.store.snapshot.manifest import NAME as MANIFEST
from octavo.store.snapshot.manifest import FileRecord, SnapshotManifest


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file: its header, and where its data lies: `size` bytes from byte `begin` of the host buffer."""

    name: str
    header: str
    begin: int
    size: int


@dataclass(frozen=True)
class Job:
    """Everything the writer needs besides the bytes of the tensors. small: further files, name -> bytes as latin-1.

    patience: seconds rank 0 waits for the parts of the others.
    """

    step: int
    kind: Literal["full", "adapter"]
    run: str
    life: str
    base: str = ""
    rank: int = 0
    world: int = 1
    buffer: int = 0
    files: Sequence[FilePlan] = ()
    small: Mapping[str, str] = field(default_factory=dict)
    keep: Keep = field(default_factory=Keep)
    patience: float = 600.0

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        files = tuple(FilePlan(**plan) for plan in values["files"])
        return cls(**{**values, "files": files, "keep": Keep(**values["keep"])})

    @property
    def name(self) -> str:
        return f"{FULL if self.kind == 'full' else ADAPTER}-{self.step}"


def write(
    folder: SnapshotFolder,
    job: Job,
    source: Callable[[FilePlan], Source],
    pool: Executor | None,
    given_up: Callable[[], str | None],
) -> None:
    """Write this rank's part and, on rank 0, make the snapshot visible. OSError or an OctavoError when it failed.

    given_up: asked while rank 0 waits for others; a reason ends the wait.
    """
    work = folder.work(job.name, job.run, job.life)
    try:
        folder.files.make_folder(work)
        records = _write_part(folder, job, work, source, pool)
        if job.rank:
            _leave_part(folder, work, job.rank, {name: r.model_dump(mode="json") for name, r in records.items()})
            return
        for rank in range(1, job.world):
            records |= _part_of(work, rank, job.patience, given_up)
        _commit(folder, job, work, records)
    except BaseException as error:
        if job.rank:
            with suppress(OSError):
                _leave_part(folder, work, job.rank, {"error": str(error)})
        else:
            with suppress(OSError):
                folder.files.remove_tree(work)
        raise


def _write_part(
    folder: SnapshotFolder, job: Job, work: Path, source: Callable[[FilePlan], Source], pool: Executor | None
) -> dict[str, FileRecord]:
    records = {}
    for plan in job.files:
        header = plan.header.encode()
        records[plan.name] = folder.files.write_file(
            work / plan.name, len(header).to_bytes(8, "little") + header, plan.size, source(plan), pool
        )
    for name, text in job.small.items():
        records[name] = folder.files.write_small(work / name, text.encode("latin-1"))
    folder.files.sync_folder(work)
    return records


def _leave_part(folder: SnapshotFolder, work: Path, rank: int, content: dict[str, Any]) -> None:
    folder.files.replace_file(work / f"part-{rank}.json", json.dumps(content).encode())


def _part_of(work: Path, rank: int, patience: float, given_up: Callable[[], str | None]) -> dict[str, FileRecord]:
    path, until = work / f"part-{rank}.json", time.monotonic() + patience
    while not path.exists():
        reason = given_up()
        if reason is None and time.monotonic() >= until:
            reason = f"nothing for {patience:.0f} s; a folder that all nodes share is needed"
        if reason is not None:
            raise RefusedError(f"rank {rank} has not written its part of {work.name}", got=reason)
    try:
        content = read_json(path)
        if "error" in content:
            raise RefusedError(f"rank {rank} could not write its part", got=content["error"])
        records = {name: FileRecord.model_validate(record) for name, record in content.items()}
    except (*UNREADABLE, TypeError) as error:
        raise CheckpointError(f"{path}", got=str(error)[:200]) from None
    for name, record in records.items():
        if not (work / name).is_file() or (work / name).stat().st_size != record.size:
            need = "a folder that all nodes share"
            raise CheckpointError(f"{work / name}", got=f"not what rank {rank} says it wrote", need=need)
    os.unlink(path)
    return records


def _commit(folder: SnapshotFolder, job: Job, work: Path, records: dict[str, FileRecord]) -> None:
    manifest = SnapshotManifest(
        step=job.step, run=job.run, kind=job.kind, world=job.world, base=job.base, files=dict(sorted(records.items()))
    )
    target = folder.path / job.name
    if target.exists():
        raise CheckpointError(f"{target} exists", need="a step that is not there yet")
    folder.files.write_small(work / MANIFEST, manifest.sealed())
    folder.files.sync_folder(work)
    folder.files.rename(work, target)
    folder.files.sync_folder(folder.path)
