"""Distributed tensors: which part of one a rank writes, and how a snapshot is read on any number of ranks.

Reading is torch.distributed.checkpoint's: its safetensors reader and its planner, which knows which slices of which
files make up the shard of a rank. Writing asks no other rank anything (docs/adr/0004).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor

from octavo.base.errors import CheckpointError, UnsupportedError
from octavo.store.snapshot.layout import Piece


@dataclass(frozen=True)
class Target:
    """A tensor as stored: its whole shape, whatever the shards."""

    shape: torch.Size
    dtype: torch.dtype

    def empty_like(self, parameter: torch.Tensor, *, scalars_on_device: bool) -> torch.Tensor:
        """Room for a moment of a parameter: sharded alike if it has its shape, else plain."""
        if self.shape == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=self.dtype)
        device = torch.device("cpu") if not self.shape and not scalars_on_device else parameter.device
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def is_sharded(value: torch.Tensor) -> bool:
    return isinstance(value, DTensor)


def whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor put together from its shards; all ranks call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_piece(value: torch.Tensor) -> Piece | None:
    """What this rank holds of a tensor; None if nothing."""
    if not isinstance(value, DTensor):
        return Piece(value.detach())
    # The protocol by which torch.distributed.checkpoint asks tensors.
    chunk = value.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
    local = value.to_local().detach()
    if value.numel() and not local.numel():
        return None
    return Piece(local, tuple(chunk.offsets))


def is_writer(value: torch.Tensor, turn: int, rank: int) -> bool:
    """Whether this rank writes its part. turn: the rank that writes it where every rank holds the whole."""
    if not isinstance(value, DTensor):
        return rank == turn
    place = value.device_mesh.get_coordinate()
    if place is None:
        return False
    return all(at == 0 for at, how in zip(place, value.placements, strict=True) if how.is_replicate())


def stored_tensors(folder: Path) -> dict[str, Target]:
    """Name -> shape and dtype of everything in the safetensors files of a snapshot. CheckpointError if unreadable."""
    try:
        found = _reader(folder).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"snapshot {folder} is not readable", got=str(error)[:200]) from None
    return {name: Target(entry.size, entry.properties.dtype) for name, entry in found.items()}


def load_tensors(folder: Path, into: Mapping[str, torch.Tensor], group: Any = None) -> None:
    """Fill tensors, sharded or not, in place. group: the CPU group of all ranks, or None for one process."""
    from torch.distributed.checkpoint.state_dict_loader import load

    for name, value in into.items():
        if isinstance(value, DTensor) and any(how.is_partial() for how in value.placements):
            raise UnsupportedError(f"tensor {name}", got="partial sums", need="shards or whole tensors")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*", category=UserWarning)
        load(dict(into), storage_reader=_reader(folder), process_group=group, no_dist=group is None)


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder))
