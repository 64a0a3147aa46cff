"""ShardWriter: safetensors written in place, slice by slice, in any order, without holding a shard in memory.

All shapes are known before the first byte, so headers are written first and every slice has its final offset. A shard
is `NAME.partial` until all its bytes are on the disk; then it is renamed. The index comes last.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from octavo.base.errors import CheckpointError, ShapeError
from octavo.base.report import atomic_write, sync_folder
from octavo.store.header import header_bytes
from octavo.store.raw_header import INDEX

DEFAULT_SHARD = 5_000_000_000  # bytes
PARTIAL = ".partial"

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def plan_shards(entries: Entries, max_shard_size: int = DEFAULT_SHARD) -> dict[str, list[str]]:
    """File name -> tensors, filled in the given order up to max_shard_size bytes; a larger module gets its own file.

    Neighbours of one module (weight, scale, bias) stay in one file.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for names in _modules(entries):
        size = sum(prod(shape) * dtype.itemsize for dtype, shape in map(entries.__getitem__, names))
        if shards[-1] and used + size > max_shard_size:
            shards.append([])
            used = 0
        shards[-1] += names
        used += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def _modules(entries: Entries) -> list[list[str]]:
    groups: list[list[str]] = []
    last = None
    for name in entries:
        module = name.rpartition(".")[0] or name
        if module == last:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = module
    return groups


class ShardWriter:
    """Write the tensors of `entries` (name -> dtype, shape) into `folder`.

    put() may be called from several threads and in any order; finish_shard() once all of a shard's bytes are put.
    A shard whose final name exists already, of exactly the planned size, counts as done: that is how a killed
    conversion resumes. The caller answers for its content belonging to the same job.
    """

    def __init__(self, folder: Path, entries: Entries, *, max_shard_size: int = DEFAULT_SHARD) -> None:
        self.folder, self.entries = folder, entries
        self.shards = plan_shards(entries, max_shard_size)
        self.shard_of = {name: file for file, names in self.shards.items() for name in names}
        self._offsets: dict[str, int] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._handles: dict[str, int] = {}
        for file, names in self.shards.items():
            # Wider types first: every tensor is then aligned to its own size, as readers that map the file want it.
            order = sorted(names, key=lambda name: -entries[name][0].itemsize)
            header, offsets = header_bytes((name, *entries[name]) for name in order)
            self._headers[file], self._sizes[file] = header, len(header) + sum(map(self._nbytes, names))
            self._offsets.update(offsets)

    def _nbytes(self, name: str) -> int:
        dtype, shape = self.entries[name]
        return prod(shape) * dtype.itemsize

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(map(self._nbytes, self.entries))

    def size_of(self, file: str) -> int:
        """Bytes of a shard on disk, header included."""
        return self._sizes[file]

    @property
    def missing_size(self) -> int:
        """Bytes that the shards still to be written will take."""
        return sum(size for file, size in self._sizes.items() if not self.done(file))

    def done(self, file: str) -> bool:
        """True for a shard that is complete on disk."""
        path = self.folder / file
        return path.is_file() and path.stat().st_size == self.size_of(file)

    def open_shard(self, file: str) -> int:
        """Create the shard with its header and its full size reserved: a full disk shows here. Returns the handle."""
        path = self.folder / (file + PARTIAL)
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._handles[file] = handle
        try:
            os.posix_fallocate(handle, 0, self._sizes[file])
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
        _write(handle, self._headers[file], 0)
        return handle

    def put(self, name: str, data: torch.Tensor, row: int = 0) -> None:
        """Write rows [row, row + len(data)) of a tensor, or all of it. dtype and trailing shape must be as planned."""
        dtype, shape = self.entries[name]
        fits = data.ndim == len(shape) and tuple(data.shape[1:]) == shape[1:]
        if data.dtype != dtype or not fits or (shape and row + data.shape[0] > shape[0]):
            raise ShapeError(f"write of {name}", got=f"{list(data.shape)} {data.dtype}", need=f"{list(shape)} {dtype}")
        offset = self._offsets[name] + row * prod(shape[1:]) * dtype.itemsize
        _write(self._handles[self.shard_of[name]], memory_of(data), offset)

    def sync(self, file: str) -> None:
        """Start what is written on its way to the disk, so that little is left for finish_shard. Blocks; GIL-free."""
        os.fdatasync(self._handles[file])

    def finish_shard(self, file: str) -> None:
        """fsync and give the shard its final name."""
        handle = self._handles.pop(file)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(self.folder / (file + PARTIAL), self.folder / file)
        sync_folder(self.folder)

    def finish(self) -> None:
        """Write the index, when there is more than one shard. CheckpointError if a shard is not done."""
        for file in self.shards:
            if not self.done(file):
                raise CheckpointError(f"{self.folder / file}", got="an unfinished shard", need="all shards written")
        if len(self.shards) > 1:
            index = {"metadata": {"total_size": self.total_size}, "weight_map": dict(sorted(self.shard_of.items()))}
            atomic_write(self.folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")

    def close(self) -> None:
        """Let go of open files, finished or not."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def write_tensors(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, max_shard_size: int = DEFAULT_SHARD
) -> Sequence[str]:
    """Write tensors that are in memory already, with an index when they fill several shards. Returns the files."""
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = ShardWriter(folder, entries, max_shard_size=max_shard_size)
    try:
        for file, names in writer.shards.items():
            writer.open_shard(file)
            for name in names:
                writer.put(name, tensors[name])
            writer.finish_shard(file)
        writer.finish()
    finally:
        writer.close()
    return list(writer.shards)


def memory_of(data: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    flat = data.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _write(handle: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
