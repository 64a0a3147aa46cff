"""The package's CUDA sources, compiled for the host: the same text, run thread by thread by emulator.h."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.kernels.cuda import loader

COMPILER = shutil.which("g++") or shutil.which("clang++")
PROGRAM = """
#include "emulator.h"
{source}
struct Address {{  // becomes whatever pointer the kernel declares
    void* at;
    template <class T> operator T*() const {{ return static_cast<T*>(at); }}
}};
extern "C" int launch(int blocks_x, int blocks_y, int blocks_z, int threads, {parameters}) {{
    dim3 grid;
    grid.x = blocks_x, grid.y = blocks_y, grid.z = blocks_z;
    return emulator::launch(grid, threads, [&] {{ {entry}({arguments}); }});
}}
"""
TYPES = {
    np.int32: ("int", ctypes.c_int, int),
    np.int64: ("i64", ctypes.c_longlong, int),
    np.float32: ("float", ctypes.c_float, float),
}


@cache
def build(folder: Path, entry: str, source: str, kinds: tuple[type, ...]) -> ctypes.CDLL:
    """kinds: of the kernel's arguments, one of TYPES or torch.Tensor (an address)."""
    names = [f"p{i}" for i in range(len(kinds))]
    declared = [
        f"{TYPES[kind][0] if kind in TYPES else 'void*'} {name}" for kind, name in zip(kinds, names, strict=True)
    ]
    passed = [name if kind in TYPES else f"Address{{{name}}}" for kind, name in zip(kinds, names, strict=True)]
    text = PROGRAM.format(source=source, parameters=", ".join(declared), entry=entry, arguments=", ".join(passed))
    stem = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    stem.with_suffix(".cpp").write_text(text)
    command = [str(COMPILER), "-std=c++17", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    command += [f"-I{Path(__file__).parent}", "-o", f"{stem}.so", f"{stem}.cpp"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(f"{stem}.so")


def launch(folder: Path, variant: loader.Variant, grid: tuple[int, ...], threads: int, arguments: Any) -> None:
    """What `loader.launch` does, on CPU tensors."""
    kinds = tuple(type(a) if isinstance(a, np.generic) else torch.Tensor for a in arguments)
    library = build(folder, variant.entry, variant.text, kinds)
    values = [
        TYPES[type(a)][1](TYPES[type(a)][2](a))
        if isinstance(a, np.generic)
        else ctypes.c_void_p(None if a is None else a.data_ptr())
        for a in arguments
    ]
    assert variant.shared <= 227 << 10, f"no GPU has so much shared memory: {variant}"
    assert library.launch(*(*grid, 1, 1)[:3], threads, *values) == 0, f"deadlock in {variant}"
