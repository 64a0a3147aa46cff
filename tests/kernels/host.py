"""The package's CUDA sources, compiled for the host: the same text, run thread by thread by emulator.h."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

import octavo.kernels.cuda as cuda_sources

SOURCES = Path(cuda_sources.__file__).parent
HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")

LAUNCH = """
#include "emulator.h"
#define NAME kernel
#include "{source}"
extern "C" int launch(int blocks_x, int blocks_y, int threads, {parameters}) {{
    dim3 grid; grid.x = blocks_x; grid.y = blocks_y;
    return emulator::launch(grid, threads, [&] {{ kernel({names}); }});
}}
"""


@cache
def build(folder: Path, source: str, parameters: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """source: a file of octavo/kernels/cuda; parameters: those of its kernel, as C declares them."""
    names = ", ".join(part.split()[-1].lstrip("*") for part in parameters.split(","))
    text = LAUNCH.format(source=source, parameters=parameters, names=names)
    stem = hashlib.sha256(repr((text, defines)).encode()).hexdigest()[:16]
    (folder / f"{stem}.cpp").write_text(text)
    command = [str(COMPILER), "-std=c++17", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    command += [f"-D{name}={value}" for name, value in defines] + [f"-I{HERE}", f"-I{SOURCES}"]
    subprocess.run([*command, "-o", folder / f"{stem}.so", folder / f"{stem}.cpp"], check=True, env=os.environ)
    return ctypes.CDLL(str(folder / f"{stem}.so"))


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)
