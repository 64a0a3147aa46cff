"""The header of a safetensors file, checked byte for byte before anything is mapped.

Layout (safetensors format description): 8 bytes little-endian length n, n bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data without holes. Offsets count from the end of the JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo.base.report import check_regular

MAX_HEADER = 100_000_000  # the limit of the safetensors library, bytes

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
class Problem:
    """What is wrong with a checkpoint. fatal: the tensor or the file cannot be used; others are worth saying.

    code: `truncated`, `missing-shard`, `duplicate` and so on; file and tensor: where, empty if it is the whole folder.
    """

    code: str
    file: str
    tensor: str
    message: str
    fix: str = ""
    fatal: bool = True

    @property
    def where(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor) if part)


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
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as handle:
        length_bytes = handle.read(8)
        if len(length_bytes) < 8:
            return {}, [_truncated(file, "", f"{size} bytes, too short for a header")]
        length = struct.unpack("<Q", length_bytes)[0]
        if length > MAX_HEADER:
            return {}, [_broken(file, f"a header of {length} bytes is announced; is this a safetensors file?")]
        text = handle.read(length)
    if len(text) < length:
        return {}, [_truncated(file, "", f"header announces {length} bytes, the file ends after {len(text)}")]
    repeated: list[str] = []
    try:
        raw = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, repeated))
        if not isinstance(raw, dict):
            raise TypeError("header is no JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        return {}, [_broken(file, f"header is not valid JSON ({error})")]
    problems = [_duplicate(file, name) for name in repeated]
    tensors = {}
    for name, entry in raw.items():
        if name == "__metadata__":
            continue
        info = _entry(file, name, entry, 8 + length)
        if isinstance(info, Problem):
            problems.append(info)
        else:
            tensors[name] = info
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)))
    return tensors, problems + _check_extent(file, tensors, 8 + length, size, complete=not problems)


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """A header for tensors laid out in this order, padded to 8 bytes, and each one's first byte in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        return Problem("bad-header", file, name, f"header entry is malformed: {str(entry)[:80]}", "Download it again.")
    if dtype not in DTYPES:
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
            problems.append(_truncated(file, name, what))
        elif info.begin < end or (complete and info.begin > end):
            text = f"starts at byte {info.begin}, the tensor before it ends at {end}"
            problems.append(Problem("bad-header", file, name, text, "Download the file again."))
        end = max(end, info.begin + info.nbytes)
    if complete and not problems and end != size:
        problems.append(_broken(file, f"{size - end} bytes after the last tensor belong to nothing"))
    return problems


def _unique(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            repeated.append(key)
        result[key] = value
    return result


def _truncated(file: str, tensor: str, what: str) -> Problem:
    return Problem("truncated", file, tensor, what, "The download or copy was cut short: fetch the file again.")


def _broken(file: str, what: str) -> Problem:
    return Problem("bad-header", file, "", what, "Fetch the file again.")


def _duplicate(file: str, tensor: str) -> Problem:
    return Problem(
        "duplicate", file, tensor, "the tensor is listed twice", "Keep one of the two and rebuild the index."
    )
