"""Host memory that the training process fills and the writer process reads: anonymous, shared, pinned for a GPU."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import torch

from octavo.base.log import logger

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process
MARGIN = 0.1  # of what is free stays free


class HostBuffer:
    """nbytes of shared memory as a uint8 tensor. An anonymous file, which /dev/shm's size does not limit.

    pin: page-locked for this GPU, so that copies from it run beside its kernels; 12 GB take seconds, so do it early.
    Where that is refused a warning says so, and copies take training's time.
    """

    def __init__(self, nbytes: int, *, pin: torch.device | None) -> None:
        self.nbytes = nbytes
        self.handle = os.memfd_create("octavo-snapshot", os.MFD_CLOEXEC)
        os.ftruncate(self.handle, max(nbytes, 1))
        self._map = mmap.mmap(self.handle, max(nbytes, 1))
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        self.data.zero_()  # several threads fault the pages in; pinning would do it with one
        self.pinned = pin is not None and self._pin(pin)

    def _pin(self, gpu: torch.device) -> bool:
        with torch.cuda.device(gpu):  # a thread's own is the first GPU, which other ranks use
            code = int(_cuda().cudaHostRegister(self.data.data_ptr(), self.data.numel(), PORTABLE))
        if code:
            logger().warning(
                "%.1f GB of host memory cannot be pinned (CUDA error %d): training waits while a snapshot is copied",
                self.nbytes / 1e9,
                code,
            )
        return code == 0

    def close(self) -> None:
        """The memory goes once the writer has let go of it too."""
        if self.pinned:
            _cuda().cudaHostUnregister(self.data.data_ptr())
        os.close(self.handle)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def buffers_that_fit(nbytes: int, processes: int = 1, free: int | None = None) -> int:
    """2, 1 or 0: the buffers of nbytes that each of `processes` on a machine can have. free: bytes, else measured."""
    free = free_memory() if free is None else free
    return min(2, int(free * (1 - MARGIN)) // max(nbytes * processes, 1))


def free_memory(proc: Path = Path("/proc/meminfo"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory this process may still take: what the machine has, or its container, if that is less."""
    lines = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int((cgroups / limit).read_text()) - int((cgroups / used).read_text()))
        except (OSError, ValueError):  # no such version of cgroups, or no limit
            continue
    return max(free, 0)
