"""Snapshots on object storage, through fsspec: data first, read back, the manifest last and only if none is there.

step-N/SEAL/NAME         data; SEAL begins the manifest's hash, so two writers of one step never mix their objects
step-N/manifest.json     makes the snapshot exist; written with If-None-Match, so that one writer wins
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from octavo.base.errors import CheckpointError, OctavoError, RefusedError, UnsupportedError
from octavo.base.log import logger
from octavo.base.packages import pip_line
from octavo.store.snapshot.files import BLOCK, problem_of
from octavo.store.snapshot.folder import FULL, Keep, SnapshotFolder
from octavo.store.snapshot.manifest import NAME as MANIFEST
from octavo.store.snapshot.manifest import FileRecord, SnapshotManifest

ATTEMPTS, FIRST_WAIT = 5, 0.5  # seconds; doubled each time
THREADS = 4
T = TypeVar("T")


class RemoteStore:
    """url: `s3://bucket/prefix` or any that fsspec knows. options: of its file system, such as endpoint_url.

    UnsupportedError without fsspec or the package of the protocol.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None, *, first_wait: float = FIRST_WAIT) -> None:
        try:
            from fsspec.core import url_to_fs

            self.fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **(options or {}))
        except (ImportError, ValueError) as error:
            raise UnsupportedError(f"snapshots on {url}", got=str(error), fix=f"Run: {pip_line('cloud')}") from None
        self.url, self.root, self.first_wait = url, root.rstrip("/"), first_wait

    def steps(self) -> list[int]:
        """The steps whose manifest is there, ascending."""
        found = self._try(lambda: self.fs.glob(f"{self.root}/{FULL}-*/{MANIFEST}"))
        steps = (re.fullmatch(rf"{FULL}-(\d+)", path.split("/")[-2]) for path in found)
        return sorted(int(match[1]) for match in steps if match)

    def manifest(self, step: int) -> SnapshotManifest:
        path = self._manifest_path(step)
        try:
            document = json.loads(self._try(lambda: self.fs.cat_file(path)))
        except ValueError as error:
            raise CheckpointError(f"{path} is no manifest", got=str(error)[:200]) from None
        return SnapshotManifest.unsealed(document, path)

    def upload(self, folder: Path) -> None:
        """A verified local snapshot. RefusedError when another snapshot of the same step is there already."""
        manifest = SnapshotManifest.read(folder)
        sealed, step = manifest.sealed(), manifest.step
        if not self._is_free(step, sealed):
            return
        data = self._data(manifest)
        with ThreadPoolExecutor(THREADS) as pool:
            list(
                pool.map(lambda item: self._upload(folder / item[0], f"{data}/{item[0]}", item[1]), self._of(manifest))
            )
        with suppress(FileExistsError):
            self._try(lambda: self.fs.pipe_file(self._manifest_path(step), sealed, mode="create"))
        if self._is_free(step, sealed):  # not every store knows If-None-Match: read back whose manifest it is
            raise OSError(f"{self._manifest_path(step)} was written and is not there")

    def fetch(self, step: int, folder: SnapshotFolder, life: str) -> None:
        """Bring a snapshot into the local folder, verified there. CheckpointError when its bytes are not as written."""
        manifest = self.manifest(step)
        work = folder.work(f"{FULL}-{step}", manifest.run, life)
        folder.files.make_folder(work)
        try:
            for name, record in self._of(manifest):
                path = work / name
                self._try(partial(self.fs.get_file, f"{self._data(manifest)}/{name}", str(path)))
                if problem := problem_of(path, record):
                    raise CheckpointError(f"{self.url}/{FULL}-{step}", got=problem)
                handle = path.open("rb")
                with handle:
                    folder.files.sync(handle.fileno())
            folder.files.write_small(work / MANIFEST, manifest.sealed())
            folder.files.sync_folder(work)
            folder.files.rename(work, folder.at(step))
            folder.files.sync_folder(folder.path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def prune(self, run: str, keep: Keep, best: int | None) -> None:
        """As SnapshotFolder.prune, for the snapshots of this run; manifests go before their data."""
        mine = []
        for step in self.steps():
            try:
                if self.manifest(step).run == run:
                    mine.append(step)
            except OctavoError as error:
                logger().warning("%s", error.message)
        for step in mine[: -keep.last]:
            if step != best and not (keep.every and step % keep.every == 0):
                self._try(partial(self.fs.rm, self._manifest_path(step)))
                self._try(partial(self.fs.rm, f"{self.root}/{FULL}-{step}", recursive=True))

    def abort_unfinished(self) -> None:
        """End the multipart uploads that killed processes left under this prefix; S3 would bill them for ever."""
        if "s3" not in self.fs.protocol:
            return
        bucket, _, prefix = self.root.partition("/")
        listed = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/" if prefix else "")
        for upload in listed.get("Uploads") or []:
            names = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            self.fs.call_s3("abort_multipart_upload", **names)

    def _upload(self, path: Path, target: str, record: FileRecord) -> None:
        """Put one file and read it back; what comes back wrong is put again."""

        def once() -> None:
            try:
                self.fs.put_file(str(path), target)
            except FileNotFoundError as error:
                if path.exists():  # an upload in parts that the store knows no more
                    raise OSError(f"{target} was not stored: {error}") from error
                raise
            digests = tuple(hashlib.sha256(block).hexdigest() for block in self._blocks(target, record.size))
            if record.size and digests != record.sha256:
                raise OSError(f"{target} came back with other bytes than were sent")

        self._try(once)

    def _blocks(self, target: str, size: int) -> Iterator[bytes]:
        for begin in range(0, size, BLOCK):
            yield self.fs.cat_file(target, start=begin, end=min(begin + BLOCK, size))

    def _is_free(self, step: int, sealed: bytes) -> bool:
        """False if this very snapshot is there; RefusedError if another one is."""
        path = self._manifest_path(step)
        if not self._try(lambda: self.fs.exists(path)):
            return True
        if self._try(lambda: self.fs.cat_file(path)) == sealed:
            return False
        fix = "Give each run a url of its own."
        raise RefusedError(f"{self.url}/{FULL}-{step}", got="a snapshot of another run", need="a free place", fix=fix)

    def _try(self, action: Callable[[], T]) -> T:
        """Again after a while, since 503 means later; not when the answer would be the same."""
        for attempt in range(ATTEMPTS):
            try:
                return action()
            except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError):
                raise
            except Exception as error:  # every file system has kinds of its own, of checksums and broken connections
                if attempt == ATTEMPTS - 1:
                    raise OSError(f"{type(error).__name__}: {error}") from error
                time.sleep(self.first_wait * 2**attempt)
        raise AssertionError

    def _manifest_path(self, step: int) -> str:
        return f"{self.root}/{FULL}-{step}/{MANIFEST}"

    def _data(self, manifest: SnapshotManifest) -> str:
        return f"{self.root}/{FULL}-{manifest.step}/{hashlib.sha256(manifest.sealed()).hexdigest()[:16]}"

    @staticmethod
    def _of(manifest: SnapshotManifest) -> list[tuple[str, FileRecord]]:
        return sorted(manifest.files.items())
