"""Mutated checkpoints: one seed, one folder that something went wrong with. `python -m tests.workflows.fuzz` runs them.

Everything that a stranger's folder can hold is mutated: the JSON of config and index as values and as bytes, headers as
structures and as bytes, the data, and what lies in the folder at all (links, pipes, folders in place of files).
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
WIDTHS = {"F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1, "BOOL": 1, "BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4}
WIDTHS |= {"F64": 8, "I64": 8, "F8_E8M0": 1, "F4": 1, "C64": 8}
VALUES = [None, True, False, 0, -1, 1, 2, 3, 128, 1 << 40, 1 << 70, 1.5, 1e308, "", "x", "re:(", "re:.*", "fp8", "8"]
VALUES += [[], {}, [1], {"a": 1}, [[128]], [128, 128], [0, 0], ["Linear"], "\u0000", "a.b", "../x", "lm_head", "tensor"]
VALUES += ["compressed-tensors", "modelopt", "block", "channel", "static", "re:(a+)+$", "model", "é\ud800", -(1 << 63)]
BYTES = b'\x00\xff0129"{}[],:-AFx\\u.eE\n'
NAMES = [
    "",
    ".",
    "..",
    "weight",
    "x" * 3000,
    "model..weight",
    "lm_head.weight",
    "é",
    "model.layers.99999.mlp.up_proj.weight",
]
NAMES += [
    "model.layers.0.mlp.experts.0.up_proj.weight",
    "a/../b.weight",
    "__metadata__",
    "model.layers.-1.q_proj.weight",
]
PATHS = [
    "../outside/model.safetensors",
    "/etc/passwd",
    "..",
    "",
    ".",
    "config.json",
    "x/../../outside/model.safetensors",
]
PATHS += ["model-00009-of-00002.safetensors", "C:\\x.safetensors", "\u0000.safetensors", "~/x.safetensors", "a" * 300]
# What a file that an earlier mutation broke raises when it is taken apart.
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, RecursionError, OverflowError)


@dataclass
class Tensors:
    """A safetensors file as its header and its data."""

    header: dict[str, Any]
    data: bytes

    @classmethod
    def parse(cls, raw: bytes) -> Tensors:
        (size,) = struct.unpack("<Q", raw[:8])
        return cls(json.loads(raw[8 : 8 + size]), raw[8 + size :])

    def pack(self) -> bytes:
        text = json.dumps(self.header).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(text)) + text + self.data

    def names(self) -> list[str]:
        return [name for name in self.header if name != "__metadata__"]


@dataclass
class Mutant:
    """files: name -> bytes. special: name -> what takes its place (folder, pipe, link...). log: what was done."""

    files: dict[str, bytes]
    special: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in self.files.items():
            if name not in self.special:
                (folder / name).write_bytes(data)
        for name, kind in self.special.items():
            if kind == "folder":
                (folder / name).mkdir()
            elif kind == "pipe":
                os.mkfifo(folder / name)
            else:
                (folder / name).symlink_to(kind)


def pristine(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def mutate(files: dict[str, bytes], seed: int) -> Mutant:
    """One to three mutations."""
    rng = random.Random(seed)
    mutant = Mutant(dict(files))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kinds, weights = zip(*KINDS, strict=True)
        kind = rng.choices(kinds, weights)[0]
        names = [n for n in sorted(mutant.files) if n not in mutant.special and n.endswith(suffix_of(kind))]
        if names:
            name = rng.choice(names)
            kind(rng, mutant, name)
            mutant.log.append(f"{kind.__name__}({name})")
    return mutant


def suffix_of(kind: Callable[..., None]) -> tuple[str, ...]:
    if kind.__name__.startswith("json"):
        return (".json",)
    if kind.__name__.startswith(("header", "data", "length")):
        return (".safetensors",)
    return (INDEX,) if kind.__name__.startswith("index") else (".json", ".safetensors")


# --------------------------------------------------------------------------------------------------------------- JSON
def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*here, key))


def change(rng: random.Random, value: Any) -> Any:
    """One place of a JSON value: replaced, removed, renamed, copied from elsewhere."""
    places = list(paths(value))
    *parents, last = rng.choice(places) or (None,)
    if last is None:
        return copy.deepcopy(rng.choice(VALUES))
    target = value
    for key in parents:
        target = target[key]
    action = rng.randrange(6)
    if action == 0:
        del target[last]
    elif action == 1 and isinstance(target, dict):
        target[rng.choice([*map(str, VALUES[:8]), "weights", "targets", "ignore"])] = target.pop(last)
    elif action == 2:
        other: Any = value
        for key in rng.choice(places):
            other = other[key]
        target[last] = copy.deepcopy(other)
    elif action == 3 and isinstance(target[last], str):
        target[last] = target[last] + rng.choice(["x", ".", "\n", "re:", "*"])
    elif action == 4 and isinstance(target[last], int):
        target[last] = target[last] + rng.choice([-1, 1, 128, -target[last], 10**6])
    else:
        target[last] = copy.deepcopy(rng.choice(VALUES))
    return value


def json_value(rng: random.Random, mutant: Mutant, name: str) -> None:
    try:
        value = change(rng, json.loads(mutant.files[name]))
    except MALFORMED:
        return
    mutant.files[name] = json.dumps(value).encode("utf-8", "surrogatepass")


def json_bytes(rng: random.Random, mutant: Mutant, name: str) -> None:
    raw = bytearray(mutant.files[name])
    action = rng.randrange(5)
    if action == 0:
        del raw[rng.randrange(len(raw) + 1) :]
    elif action == 1:
        raw = bytearray(rng.choice([b"[" * 50_000, b'{"a":' * 5_000, b"\xef\xbb\xbf" + raw, b"9" * 6_000, b"NaN", b""]))
    else:
        for _ in range(rng.randint(1, 4)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.choice(BYTES)
    mutant.files[name] = bytes(raw)


def index_path(rng: random.Random, mutant: Mutant, name: str) -> None:
    """A path that leads elsewhere, or to another shard."""
    try:
        index = json.loads(mutant.files[name])
        names = sorted(index["weight_map"])
        for tensor in rng.sample(names, min(len(names), rng.choice((1, 1, len(names))))):
            index["weight_map"][tensor] = rng.choice([*PATHS, *sorted(mutant.files)])
    except MALFORMED:
        return
    mutant.files[name] = json.dumps(index).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------------------------------------------------- safetensors
def parsed(mutant: Mutant, name: str) -> Tensors | None:
    try:
        found = Tensors.parse(mutant.files[name])
    except MALFORMED:
        return None
    return found if isinstance(found.header, dict) and found.names() else None


def header_value(rng: random.Random, mutant: Mutant, name: str) -> None:
    if (file := parsed(mutant, name)) is not None:
        file.header = change(rng, file.header)
        mutant.files[name] = file.pack()


def header_entry(rng: random.Random, mutant: Mutant, name: str) -> None:
    """A header that stays well formed: other dtypes of the same width, shapes of as many elements, names."""
    file = parsed(mutant, name)
    if file is None:
        return
    tensor = rng.choice(file.names())
    entry = file.header[tensor]
    try:
        width, shape = WIDTHS[entry["dtype"]], entry["shape"]
        action = rng.randrange(5)
        if action == 0:
            entry["dtype"] = rng.choice([d for d, w in WIDTHS.items() if w == width])
        elif action == 1:
            entry["shape"] = rng.choice([shape[::-1], [1, *shape], [*shape, 1], [-1, -1], [sum(shape)], [1 << 40, 0]])
        elif action == 2:
            entry["data_offsets"] = [n + rng.choice((-1, 0, 1, 1 << 33)) for n in entry["data_offsets"]]
        else:
            new = rng.choice([*NAMES, *file.names(), tensor + "_scale", tensor.replace("weight_scale", "scale")])
            file.header[new] = file.header.pop(tensor)
    except MALFORMED:
        return
    mutant.files[name] = file.pack()


def header_drop(rng: random.Random, mutant: Mutant, name: str) -> None:
    """A tensor that is gone, bytes and all."""
    file = parsed(mutant, name)
    if file is None:
        return
    try:
        begin, end = file.header.pop(rng.choice(file.names()))["data_offsets"]
        for other in file.names():
            offsets = file.header[other]["data_offsets"]
            file.header[other]["data_offsets"] = [n - (end - begin) if n >= end else n for n in offsets]
        file.data = file.data[:begin] + file.data[end:]
    except MALFORMED:
        return
    mutant.files[name] = file.pack()


def header_bytes(rng: random.Random, mutant: Mutant, name: str) -> None:
    raw = bytearray(mutant.files[name])
    size = min(int.from_bytes(raw[:8], "little") + 8, len(raw))
    for _ in range(rng.randint(1, 6) if size else 0):
        raw[rng.randrange(size)] = rng.choice(BYTES)
    mutant.files[name] = bytes(raw)


def length(rng: random.Random, mutant: Mutant, name: str) -> None:
    size = rng.choice([0, 1, 2, 7, 99_999_999, 1 << 32, (1 << 64) - 1, rng.randrange(20_000)])
    mutant.files[name] = struct.pack("<Q", size) + mutant.files[name][8:]


def data_bytes(rng: random.Random, mutant: Mutant, name: str) -> None:
    """Noise or one value over a stretch of the data, often a whole tensor's."""
    file = parsed(mutant, name)
    if file is None or not file.data:
        return
    begin = rng.randrange(len(file.data))
    end = min(begin + rng.choice((1, 4, 64, 4096)), len(file.data))
    try:
        if rng.random() < 0.7:
            begin, end = file.header[rng.choice(file.names())]["data_offsets"]
        noise = rng.randbytes(end - begin)
        fill = bytes([rng.choice((0, 0x7F, 0xFF, 0x7E, 0x80, 0x3F))]) * (end - begin)
        file.data = file.data[:begin] + rng.choice((noise, fill)) + file.data[end:]
    except MALFORMED:
        return
    mutant.files[name] = file.pack()


def data_end(rng: random.Random, mutant: Mutant, name: str) -> None:
    raw = mutant.files[name]
    mutant.files[name] = rng.choice([raw[: rng.randrange(len(raw) + 1)], raw + b"\x00" * rng.randint(1, 99), b""])


# -------------------------------------------------------------------------------------------------------------- folder
def entry_kind(rng: random.Random, mutant: Mutant, name: str) -> None:
    mutant.special[name] = rng.choice(["folder", "pipe", name, "nowhere", "/dev/null", "config.json"])


def entry_gone(rng: random.Random, mutant: Mutant, name: str) -> None:
    del mutant.files[name]


def entry_copy(rng: random.Random, mutant: Mutant, name: str) -> None:
    """The file under another name: duplicates of tensors, shards that no index names, a second configuration."""
    others = [
        "model.safetensors",
        "model-00003-of-00003.safetensors",
        "consolidated.safetensors",
        "hf_quant_config.json",
    ]
    mutant.files[rng.choice([*others, *sorted(mutant.files), "pytorch_model.bin", "tokenizer.json"])] = mutant.files[
        name
    ]


KINDS: list[tuple[Callable[[random.Random, Mutant, str], None], int]] = [
    (json_value, 30),
    (json_bytes, 6),
    (index_path, 5),
    (header_value, 14),
    (header_entry, 14),
    (header_drop, 6),
    (header_bytes, 8),
    (length, 2),
    (data_bytes, 8),
    (data_end, 3),
    (entry_kind, 3),
    (entry_gone, 2),
    (entry_copy, 3),
]
