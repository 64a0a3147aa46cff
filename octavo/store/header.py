"""The header of a safetensors file, checked byte for byte before anything is mapped.

The layout of the file, and the part that needs no torch: raw_header.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo.store.raw_header import Problem as Problem
from octavo.store.raw_header import broken, check_shape, read_raw_header, truncated

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: begin is its first byte in the file, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    begin: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path, file: str) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """The tensors of one file in the order of their bytes, and all that is wrong with it. OSError passes through."""
    header, problems = read_raw_header(path, file)
    if header is None:
        return {}, problems
    tensors = {}
    for name, entry in header.entries.items():
        info = _entry(file, name, entry, header.start)
        if isinstance(info, Problem):
            problems.append(info)
        else:
            tensors[name] = info
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)))
    return tensors, problems + _check_extent(file, tensors, header.start, header.size, complete=not problems)


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """A header for tensors laid out in this order, padded to 8 bytes, and each one's first byte in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offsets, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        offsets[name] = begin
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + begin for name, begin in offsets.items()}


def _entry(file: str, name: str, entry: Any, start: int) -> TensorInfo | Problem:
    try:
        dtype, shape, begin, end = check_shape(entry)
    except (KeyError, TypeError, ValueError):
        return Problem("bad-header", file, name, f"header entry is malformed: {str(entry)[:80]}", "Download it again.")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return Problem("bad-dtype", file, name, f"dtype {dtype} is unknown", "Convert the tensor to BF16 or FP32.")
    info = TensorInfo(DTYPES[dtype], shape, file, start + begin)
    if end - begin != info.nbytes:
        text = f"{list(shape)} of {dtype} are {info.nbytes} bytes, the header gives it {end - begin}"
        return Problem("bad-header", file, name, text, "Download the file again.")
    return info


def _check_extent(file: str, tensors: dict[str, TensorInfo], start: int, size: int, *, complete: bool) -> list[Problem]:
    """Tensors beyond the end of the file, overlaps, and (when every entry was readable) holes and trailing bytes."""
    problems, end = [], start
    for name, info in tensors.items():
        if info.begin + info.nbytes > size:
            what = f"needs bytes up to {info.begin + info.nbytes}, the file has {size}"
            problems.append(truncated(file, name, what))
        elif info.begin < end or (complete and info.begin > end):
            text = f"starts at byte {info.begin}, the tensor before it ends at {end}"
            problems.append(Problem("bad-header", file, name, text, "Download the file again."))
        end = max(end, info.begin + info.nbytes)
    if complete and not problems and end != size:
        problems.append(broken(file, f"{size - end} bytes after the last tensor belong to nothing"))
    return problems
