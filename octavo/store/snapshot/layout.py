"""Where every tensor of a snapshot goes: which file, which bytes of it, which bytes of the host buffer.

Files are plain safetensors. A shard of a distributed tensor says in the header where it begins, in the words of
torch.distributed.checkpoint's safetensors reader, which therefore loads a snapshot on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from octavo.store.header import header_bytes
from octavo.store.snapshot.jobs import FilePlan

SHARDING = "DCP_SHARDING_INFO"
ALIGN = 256  # bytes, of a file's data in the buffer


@dataclass(frozen=True)
class Piece:
    """A local tensor and, for a shard, where it begins in the whole, one offset per dimension."""

    tensor: torch.Tensor
    offsets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Copy:
    """A tensor and the first byte of its place in the buffer. raw: its bytes as a view, where it has no gaps."""

    tensor: torch.Tensor
    begin: int
    raw: torch.Tensor | None

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
            copies.append(Copy(piece.tensor, begin + offsets[key] - len(header), raw))
        begin += -(-size // ALIGN) * ALIGN
    return Layout(tuple(plans), tuple(copies), begin)


def _sharding(order: Sequence[tuple[str, Piece]]) -> dict[str, str]:
    """Nothing where no tensor is a shard: offsets are zero then, which readers assume."""
    if all(piece.offsets is None for _, piece in order):
        return {}
    starts = {key: {"saved_offsets": list(piece.offsets or [0] * piece.tensor.ndim)} for key, piece in order}
    return {SHARDING: json.dumps(starts)}
