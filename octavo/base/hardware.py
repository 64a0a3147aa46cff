"""What a device can do: HardwareCaps of a real device, or of one named on the command line.

Sources of the capability numbers: NVIDIA's CUDA GPU list (developer.nvidia.com/cuda-gpus) and the CUDA C++
programming guide. FP8 tensor cores: SM89 and later; MXFP8 block scales in the tensor core: SM100 and later.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class HardwareCaps:
    """sm: compute capability, (0, 0) for a CPU. memory: bytes, 0 if unknown. name: for messages. cuda: major version of
    CUDA that the driver runs, 0 if unknown, as for a GPU that is not here.
    """

    sm: tuple[int, int]
    name: str
    memory: int = 0
    cuda: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.sm > (0, 0)

    @property
    def native_fp8(self) -> bool:
        """FP8 tensor cores: Ada (8.9), Hopper (9.0), Blackwell (10.x, 12.x). Ampere has none."""
        return self.sm >= (8, 9)

    @property
    def tag(self) -> str:
        """`sm90`, or `cpu`."""
        return f"sm{self.sm[0]}{self.sm[1]}" if self.is_cuda else "cpu"

    def __str__(self) -> str:
        return f"{self.name} ({self.tag})" if self.name != self.tag else self.tag


CPU = HardwareCaps((0, 0), "cpu")

# name -> compute capability. B200 is 10.0, B300 10.3; 12.0 is RTX PRO 6000 Blackwell and the RTX 50 series.
GPUS: dict[str, tuple[int, int]] = {
    "t4": (7, 5),
    "rtx2080ti": (7, 5),
    "a100": (8, 0),
    "a30": (8, 0),
    "a10": (8, 6),
    "a10g": (8, 6),
    "a40": (8, 6),
    "rtx3080": (8, 6),
    "rtx3090": (8, 6),
    "rtxa6000": (8, 6),
    "l4": (8, 9),
    "l40": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "rtx6000ada": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "gh200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "gb300": (10, 3),
    "rtx5090": (12, 0),
    "rtx5080": (12, 0),
    "rtxpro6000": (12, 0),
    "rtxpro4500": (12, 0),
    "gb10": (12, 1),
}
KNOWN_SM = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


def caps_named(text: str) -> HardwareCaps:
    """`sm90`, `9.0`, `h100`, `RTX 3090` or `cpu` -> HardwareCaps. ConfigError names the nearest known GPU."""
    name = re.sub(r"[\s_-]|^nvidia|^geforce", "", text.lower())
    if name == "cpu":
        return CPU
    if name in GPUS:
        return HardwareCaps(GPUS[name], name)
    if match := re.fullmatch(r"(?:sm)?(\d{1,2})\.?(\d)a?", name):
        sm = (int(match[1]), int(match[2]))
        if sm in KNOWN_SM:
            return HardwareCaps(sm, f"sm{sm[0]}{sm[1]}")
    known = [*GPUS, *(f"sm{major}{minor}" for major, minor in KNOWN_SM), "cpu"]
    raise ConfigError(f"GPU '{text}' is unknown", fix=did_you_mean(name, known))


def caps_of(device: torch.device | str | None = None) -> HardwareCaps:
    """The caps of a torch device (default: the first GPU, else the CPU). The only function here that needs torch."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return CPU
    properties = torch.cuda.get_device_properties(device)
    sm = properties.major, properties.minor
    return HardwareCaps(sm, properties.name, properties.total_memory, driver_cuda())


@cache
def driver_cuda() -> int:
    """The major version of CUDA that the installed driver runs (cuDriverGetVersion); 0 where there is no driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))  # 13000 for 13.0
    except (OSError, AttributeError):
        return 0
    return version.value // 1000
