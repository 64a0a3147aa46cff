"""Where every tensor of a snapshot goes: which file, which bytes of it, which bytes of the host buffer.

Files are plain safetensors. A shard of a distributed tensor says in the header where it begins, in the words of
torch.distributed.checkpoint's safetensors reader, which therefore loads a snapshot on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from octavo.store.header import header_bytes
from octavo.store.snapshot.jobs import FilePlan

SHARDING = "DCP_SHARDING_INFO"
ALIGN = 256  # bytes, of a file's data in the buffer
SMALL = 2 << 20  # bytes; smaller tensors are joined where they are, for one copy over the bus costs 10 us to start
JOINED = 64 << 20  # bytes of such tensors in one copy


@dataclass(frozen=True)
class Piece:
    """A local tensor and, for a shard, where it begins in the whole, one offset per dimension.

    early: the next forward may change it.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...] | None = None
    early: bool = False


@dataclass(frozen=True)
class Copy:
    """A tensor and the first byte of its place in the buffer. raw: its bytes as a view, where it has no gaps."""

    tensor: torch.Tensor
    begin: int
    raw: torch.Tensor | None
    early: bool = False

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def bytes(self) -> torch.Tensor:
        """uint8 [n], on the device of the tensor."""
        return _raw(self.tensor.contiguous()) if self.raw is None else self.raw


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Layout:
    """plans: of the files. copies: what fills them, in the order of the buffer. nbytes: of the buffer."""

    plans: tuple[FilePlan, ...]
    copies: tuple[Copy, ...]
    nbytes: int

    @cached_property
    def runs(self) -> tuple[list[list[Copy]], list[list[Copy]]]:
        """What travels together: of what the next forward may change, and of the rest."""
        return _runs([c for c in self.copies if c.early]), _runs([c for c in self.copies if not c.early])


def _runs(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Small tensors of a device that are neighbours in the buffer, together; all else alone; nothing for empty ones."""
    found: list[list[Copy]] = []
    end, room = -1, 0  # where the last run ends, and how many bytes it still takes
    for copy in copies:
        if not copy.nbytes:
            continue
        small = copy.nbytes < SMALL
        if small and copy.begin == end and copy.nbytes <= room and copy.tensor.device == found[-1][-1].tensor.device:
            found[-1].append(copy)
            room -= copy.nbytes
        else:
            found.append([copy])
            room = JOINED - copy.nbytes if small else 0
        end = copy.begin + copy.nbytes
    return found


def lay_out(files: Mapping[str, Mapping[str, Piece]]) -> Layout:
    """files: name -> tensors. Wider types first in a file, so that every tensor is aligned to its own size.

    Among those, what lies in host memory last, as step counts do: the small tensors of a GPU are neighbours then.
    """
    plans: list[FilePlan] = []
    copies: list[Copy] = []
    begin = 0
    for name, pieces in files.items():
        order = sorted(pieces.items(), key=lambda item: (-item[1].tensor.element_size(), item[1].tensor.is_cpu))
        header, offsets = header_bytes(
            [(key, piece.tensor.dtype, tuple(piece.tensor.shape)) for key, piece in order], _sharding(order)
        )
        size = sum(prod(piece.tensor.shape) * piece.tensor.element_size() for _, piece in order)
        plans.append(FilePlan(name, header[8:].decode(), begin, size))
        for key, piece in order:
            raw = _raw(piece.tensor) if piece.tensor.is_contiguous() else None
            copies.append(Copy(piece.tensor, begin + offsets[key] - len(header), raw, piece.early))
        begin += -(-size // ALIGN) * ALIGN
    return Layout(tuple(plans), tuple(copies), begin)


def _sharding(order: Sequence[tuple[str, Piece]]) -> dict[str, str]:
    """Nothing where no tensor is a shard: offsets are zero then, which readers assume."""
    if all(piece.offsets is None for _, piece in order):
        return {}
    starts = {key: {"saved_offsets": list(piece.offsets or [0] * piece.tensor.ndim)} for key, piece in order}
    return {SHARDING: json.dumps(starts)}
