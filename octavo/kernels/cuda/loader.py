"""CUDA C++ to a launched kernel: compiled once per variant by NVRTC, kept on disk, launched on torch's stream.

No build step and no version to match: NVRTC comes with torch's CUDA packages, the sources include no header. Normally
the code is a cubin for the device at hand. OCTAVO_ARCH=80 compiles PTX for compute_80 instead, which the driver
translates: so the code path of an A100 runs on any later GPU.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np
import torch

from octavo.base.env import env
from octavo.base.errors import OctavoError, UnsupportedError
from octavo.base.packages import pip_line, version_of
from octavo.base.report import atomic_write

SOURCES = Path(__file__).parent
_IMPORTING = Lock()
_THREAD = local()
_WANTED: ContextVar[dict[Variant, None] | None] = ContextVar("wanted", default=None)
SCALARS = {np.int32, np.int64, np.float32}  # of a kernel's arguments; others are addresses
# A kernel that spills, keeps local arrays or computes in FP64 is a mistake, on any GPU: it does not compile.
PTXAS = ["--warn-on-spills", "--warn-on-local-memory-usage", "--warn-on-double-precision-use", "-Werror"]


@dataclass(frozen=True)
class Variant:
    """One kernel: a source file of this folder and the macros that specialize it.

    shared: bytes of its dynamic shared memory.
    """

    source: str
    defines: tuple[tuple[str, int], ...]
    shared: int = 0

    @property
    def entry(self) -> str:
        """The kernel's name, which profilers show: `octavo_gated` of gated.cu."""
        return f"octavo_{self.source.removesuffix('.cu')}"

    @property
    def text(self) -> str:
        """The whole source as one text: macros first, `#include "x.cuh"` replaced by the file."""
        body = _inlined(self.source)
        return "".join(f"#define {name} {value}\n" for name, value in (*self.defines, ("NAME", self.entry))) + body

    def __str__(self) -> str:
        return f"{self.source} ({', '.join(f'{name}={value}' for name, value in self.defines)})"


def architecture(sm: tuple[int, int]) -> str:
    """What to compile for on a device of compute capability `sm`: `sm_90a`, or `compute_80` where OCTAVO_ARCH says."""
    return f"compute_{env().arch}" if env().arch else f"sm_{sm[0]}{sm[1]}" + ("a" if sm == (9, 0) else "")


def compile_variant(variant: Variant, arch: str) -> bytes:
    """The cubin for `sm_NN` or the PTX for `compute_NN`. Needs NVRTC, and for PTX a driver; no GPU for a cubin.

    UnsupportedError: cuda-core is not installed, or the text does not compile (the line, the options and the log).
    """
    if version_of("cuda-core") is None:
        raise UnsupportedError("kernels in CUDA C++", need="the package cuda-core", fix=pip_line("gpu"))
    Program, ProgramOptions = _core().Program, _core().ProgramOptions
    cubin = arch.startswith("sm_")
    options = ProgramOptions(std="c++17", arch=arch, name=variant.source, ptxas_options=PTXAS if cubin else None)
    try:
        compiled = Program(variant.text, "c++", options).compile("cubin" if cubin else "ptx")
    except Exception as error:
        if type(error).__name__ not in ("NVRTCError", "CUDAError"):
            raise
        raise UnsupportedError(
            f"{variant} does not compile for {arch}", got=_first_error(variant.text, error)
        ) from error
    return bytes(compiled.code)


@lru_cache(maxsize=1024)
def load(variant: Variant, sm: tuple[int, int]) -> Any:
    """The kernel of `variant` for devices of this capability: from this process, from disk, or compiled now."""
    ObjectCode = _core().ObjectCode
    arch = architecture(sm)
    path = cache_folder() / f"{cache_key(variant, arch)}.{'cubin' if arch.startswith('sm_') else 'ptx'}"
    code = read_cached(path)
    if code is None:
        code = compile_variant(variant, arch)
        atomic_write(path, hashlib.sha256(code).digest() + code)
    try:
        opened = ObjectCode.from_cubin(code) if arch.startswith("sm_") else ObjectCode.from_ptx(code)
        return opened.get_kernel(variant.entry)
    except Exception as error:
        if type(error).__name__ != "CUDAError":
            raise
        raise UnsupportedError(
            f"{variant} compiled for {arch} does not load",
            got=str(error),
            need=f"a driver for CUDA {nvrtc_version()[0]} or later",
            fix="Update the NVIDIA driver; under WSL2 it is the driver of Windows.",
        ) from error


def warm_up(variants: Iterable[Variant], device: torch.device) -> None:
    """Compile and load before the first call: what CUDA graph capture needs. Several at once, on the CPU's cores."""
    sm = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: load(variant, sm), variants))


@contextmanager
def only_compiling(device: torch.device) -> Iterator[None]:
    """Inside it launches of this thread do nothing. What they would launch is compiled at the end, several at once."""
    wanted: dict[Variant, None] = {}
    token = _WANTED.set(wanted)
    try:
        yield
    finally:
        _WANTED.reset(token)
    if wanted:
        warm_up(wanted, device)


def launch(
    variant: Variant,
    grid: tuple[int, ...],
    threads: int,
    arguments: tuple[Any, ...],
    x: torch.Tensor,
    overlap: bool = False,
) -> None:
    """Launch on the device of `x` and torch's current stream there.

    arguments: tensors and None are passed as addresses, numpy scalars as they are. overlap: may start before the kernel
    before has ended (device.cuh, wait_for_previous_kernel).
    """
    if (wanted := _WANTED.get()) is not None:
        wanted[variant] = None
        return
    device = x.device
    if device.index != torch._C._cuda_getDevice():  # a tensor is there, so CUDA is initialized
        with torch.cuda.device(device):
            launch(variant, grid, threads, arguments, x, overlap)
        return
    _bind_context(device)
    kernel, config = _prepared(variant, grid, threads, overlap, device)
    # What torch.cuda.current_stream makes an object of, in a tenth of its time.
    stream = _stream(torch._C._cuda_getCurrentRawStream(device.index))
    values = [a if type(a) in SCALARS else 0 if a is None else a.data_ptr() for a in arguments]
    _core().launch(stream, config, kernel, *values)
    if env().debug_sync:
        _check(variant, grid, arguments, device)


def _bind_context(device: torch.device) -> None:
    """Torch's context, the primary one, for a thread in which the runtime has not run anything yet.

    The runtime binds it by itself, the driver, through which kernels are launched, does not: in a thread of autograd a
    launch may be the first call of all.
    """
    if getattr(_THREAD, "bound", False):
        return
    from cuda.bindings import driver

    if not int(_checked(driver.cuCtxGetCurrent())):
        context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device.index))))
        _checked(driver.cuCtxSetCurrent(context))
    _THREAD.bound = True


@lru_cache(maxsize=4096)
def _prepared(
    variant: Variant, grid: tuple[int, ...], threads: int, overlap: bool, device: torch.device
) -> tuple[Any, Any]:
    """The kernel and how it is launched on `device`, which is the current one. Kept: most launches repeat."""
    sm = torch.cuda.get_device_capability(device)
    kernel = load(variant, sm)
    if variant.shared:  # what a block gets without asking is for static memory too
        _allow_shared(variant, torch.cuda.current_device())
    early: dict[str, Any] = {"programmatic_stream_serialization": True} if overlap and may_overlap(sm) else {}
    return kernel, _core().LaunchConfig(grid=grid, block=threads, shmem_size=variant.shared, **early)


def may_overlap(sm: tuple[int, int]) -> bool:
    """Whether kernels compiled for this capability wait for the one before themselves (wait_for_previous_kernel)."""
    return sm >= (9, 0) and (not env().arch or int(env().arch) >= 90)


def cache_folder() -> Path:
    """cache_dir/kernels, private to the user: code from it is executed."""
    folder = env().cache_dir / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise UnsupportedError(
            f"kernel cache {folder}",
            got=f"a folder of user {status.st_uid}",
            fix="Name a folder of your own in OCTAVO_CACHE_DIR.",
        )
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def cache_key(variant: Variant, arch: str) -> str:
    """Source, options, compiler: whatever changes the code changes its name."""
    parts = [variant.text, arch, str(nvrtc_version()), *PTXAS]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def read_cached(path: Path) -> bytes | None:
    """The code in `path`, which begins with its SHA-256; None if it is absent or not what was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


@cache
def _core() -> Any:
    """cuda.core, imported by one thread: another would find it half imported, in spite of Python's lock."""
    with _IMPORTING:
        from cuda import core

        return core


@cache
def nvrtc_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


def _inlined(name: str) -> str:
    text = (SOURCES / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "(\w+\.cuh)"$', lambda match: _inlined(match[1]), text, flags=re.MULTILINE)


def _first_error(text: str, error: Exception) -> str:
    """The compiler's first error with the source line it speaks of, or its whole log."""
    log = str(error)
    if match := re.search(r"\((\d+)\): error: (.*)", log):
        return f"{match[2]} in: {text.splitlines()[int(match[1]) - 1].strip()}"
    return log


@cache
def limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that one block can ask for. Off the GPU, of an imagined one."""
    if device.type != "cuda":
        return 2, 99 << 10
    from cuda.bindings import driver

    names = driver.CUdevice_attribute
    count = _checked(driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _index(device)))
    optin = names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return count, _checked(driver.cuDeviceGetAttribute(optin, _index(device)))


@lru_cache(maxsize=1024)
def _allow_shared(variant: Variant, index: int) -> None:
    from cuda.bindings import driver

    kernel = load(variant, torch.cuda.get_device_capability(index))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuKernelSetAttribute(limit, variant.shared, kernel.handle, index))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status.value:
        raise OctavoError("a call of the CUDA driver failed", got=str(status))
    return values[0] if values else None


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    return _core().Stream.from_handle(handle)


def _check(variant: Variant, grid: tuple[int, ...], arguments: tuple[Any, ...], device: torch.device) -> None:
    """With OCTAVO_DEBUG_SYNC=1 a fault is an error here and now, not a dead process later."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        shapes = [list(a.shape) if isinstance(a, torch.Tensor) else str(a) for a in arguments]
        raise OctavoError(
            f"kernel {variant} failed on {device}", got=f"grid {grid}, arguments {shapes}: {error}"
        ) from error
