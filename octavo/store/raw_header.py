"""The JSON of a safetensors header, without torch: what the planner reads of models that nobody will load here.

Layout (safetensors format description): 8 bytes little-endian length n, n bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data without holes. Offsets count from the end of the JSON.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base.report import check_regular

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the limit of the safetensors library, bytes


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
class RawHeader:
    """entries: name -> what the JSON says, unchecked. start: the first byte of data. size: of the file, bytes."""

    entries: dict[str, Any]
    start: int
    size: int


def read_raw_header(path: Path, file: str) -> tuple[RawHeader | None, list[Problem]]:
    """The JSON of one file and all that is wrong with it; None where there is no reading it. OSError passes through."""
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as handle:
        length_bytes = handle.read(8)
        if len(length_bytes) < 8:
            return None, [truncated(file, "", f"{size} bytes, too short for a header")]
        length = struct.unpack("<Q", length_bytes)[0]
        if length > MAX_HEADER:
            return None, [broken(file, f"a header of {length} bytes is announced; is this a safetensors file?")]
        text = handle.read(length)
    if len(text) < length:
        return None, [truncated(file, "", f"header announces {length} bytes, the file ends after {len(text)}")]
    repeated: list[str] = []
    try:
        raw = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, repeated))
        if not isinstance(raw, dict):
            raise TypeError("header is no JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        return None, [broken(file, f"header is not valid JSON ({error})")]
    problems = [_duplicate(file, name) for name in repeated]
    if not _is_metadata(raw.pop("__metadata__", None)):
        problems.append(broken(file, "__metadata__ is no table of texts, and the safetensors library stops there"))
    return RawHeader(raw, 8 + length, size), problems


def check_shape(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype as written, shape, begin and end of one entry. KeyError, TypeError, ValueError: malformed."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError  # an empty text would pass for the shape of a scalar
    begin, end = offsets
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):  # true is an int, and no size
        raise TypeError
    return dtype, tuple(shape), begin, end


def truncated(file: str, tensor: str, what: str) -> Problem:
    return Problem("truncated", file, tensor, what, "The download or copy was cut short: fetch the file again.")


def broken(file: str, what: str) -> Problem:
    return Problem("bad-header", file, "", what, "Fetch the file again.")


def _is_metadata(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(text, str) for text in value.values()))


def _unique(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            repeated.append(key)
        result[key] = value
    return result


def _duplicate(file: str, tensor: str) -> Problem:
    return Problem(
        "duplicate", file, tensor, "the tensor is listed twice", "Keep one of the two and rebuild the index."
    )
