"""Bytes, checksums and fsync. Every operation that changes a disk is a method of Files: tests let each one fail or be
the last thing a process does.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from octavo.base.report import sync_folder
from octavo.store.snapshot.manifest import FileRecord

BLOCK = 64 << 20  # bytes; hashed and written in parallel, one sha256 each

_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

# (first byte, number of bytes) -> those bytes of the file's data
Source = Callable[[int, int], memoryview]


class Files:
    """The disk as the snapshot protocol uses it. OSError passes through everywhere."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path, size: int) -> int:
        """A new file with its space reserved, where the file system can: a full disk shows here. Returns the handle."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if size:
                os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                os.close(handle)
                raise
        return handle

    def write(self, handle: int, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(handle, data, offset)
            data, offset = data[written:], offset + written

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def sync_folder(self, path: Path) -> None:
        sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def replace_file(self, path: Path, data: bytes) -> None:
        """A small file in one piece: written beside it, renamed over it."""
        work = path.with_name(f".{path.name}.new")
        work.unlink(missing_ok=True)
        self.write_small(work, data)
        os.replace(work, path)
        self.sync_folder(path.parent)

    def write_small(self, path: Path, data: bytes) -> FileRecord:
        handle = self.create(path, len(data))
        try:
            self.write(handle, memoryview(data), 0)
            self.sync(handle)
        finally:
            os.close(handle)
        blocks = (data[begin : begin + BLOCK] for begin in range(0, len(data), BLOCK))
        return FileRecord(size=len(data), sha256=tuple(hashlib.sha256(block).hexdigest() for block in blocks))

    def remove_tree(self, path: Path) -> None:
        """A folder with all in it; of a link, the link alone."""
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    def write_file(self, path: Path, header: bytes, size: int, source: Source, pool: Executor | None) -> FileRecord:
        """header, then `size` bytes of data; block by block on the threads of `pool`, or here. Ends with an fsync."""
        total = len(header) + size
        handle = self.create(path, total)

        def block(begin: int) -> str:
            end = min(begin + BLOCK, total)
            start = max(begin - len(header), 0)
            data = source(start, max(end - len(header), 0) - start)
            if begin < len(header):  # headers are far below a block; should one be longer, the copy is still right
                data = memoryview(header[begin:end] + bytes(data))
            self.write(handle, data, begin)
            return hashlib.sha256(data).hexdigest()

        try:
            digests = tuple((pool.map if pool else map)(block, range(0, total, BLOCK)))
            self.sync(handle)
        finally:
            os.close(handle)
        return FileRecord(size=total, sha256=digests)


def problem_of(path: Path, record: FileRecord, pool: Executor | None = None) -> str | None:
    """What is wrong with a file, or None if it holds the recorded bytes."""
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path.name} has {size} bytes, {record.size} were written"
        handle = os.open(path, os.O_RDONLY)
        try:
            digests = (pool.map if pool else map)(lambda begin: _digest(handle, begin), range(0, size, BLOCK))
            if size and tuple(digests) != record.sha256:
                return f"{path.name} holds other bytes than were written"
        finally:
            os.close(handle)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None


def _digest(handle: int, begin: int) -> str:
    return hashlib.sha256(os.pread(handle, BLOCK, begin)).hexdigest()
