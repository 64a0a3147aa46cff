"""What this machine can run: hardware, versions, room, and every backend with the reason it is taken or refused."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch

from octavo import __version__
from octavo.base.allocator import EXPANDABLE, setting
from octavo.base.env import env
from octavo.base.errors import require_type
from octavo.base.hardware import HardwareCaps, caps_named, caps_of
from octavo.base.packages import extras, pip_line, version_of
from octavo.base.report import Config, Report
from octavo.formats.granularity import PerBlock
from octavo.ops.attention import LAYER, refused
from octavo.ops.backends import BACKENDS, Problem, choose

CORE_PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "numpy", "pydantic", "typer", "rich")


class DoctorConfig(Config):
    """gpu: also say which backends that GPU would take, by name or as sm90; empty: this machine's."""

    gpu: str = ""


class Gpu(Report):
    """memory and free: bytes."""

    name: str
    tag: str
    memory: int
    free: int
    native_fp8: bool


class Extra(Report):
    """A group of optional packages. packages: name -> installed version or None. install: what adds the missing."""

    name: str
    packages: dict[str, str | None]
    install: str | None


class BackendLine(Report):
    """One backend of one op on `DoctorReport.target`. reason: why it refuses, or None where it would run. kernel: how a
    chosen one multiplies, where it has several ways."""

    op: str
    name: str
    problem: str
    chosen: bool
    reason: str | None
    kernel: str = ""


class DoctorReport(Report):
    """Sizes in bytes. target: the hardware that `backends` is about. pytorch_cuda: the CUDA that torch is built for.
    allocator: the setting of CUDA's allocator in the environment, else what training asks for."""

    octavo: str
    python: str
    system: str
    cpu: str
    cores: int
    memory: int
    memory_free: int
    cache_dir: str
    disk_free: int
    packages: dict[str, str | None]
    pytorch_cuda: str | None
    allocator: str
    extras: list[Extra]
    gpus: list[Gpu]
    target: str
    backends: list[BackendLine]


def doctor(config: DoctorConfig | None = None) -> DoctorReport:
    """Look at this machine. Changes nothing and needs no GPU."""
    config = DoctorConfig() if config is None else config
    require_type("doctor: config", config, DoctorConfig)
    target = caps_named(config.gpu) if config.gpu else caps_of()
    cache = env().cache_dir
    total, free = _memory()
    return DoctorReport(
        octavo=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=_cores(),
        memory=total,
        memory_free=free,
        cache_dir=str(cache),
        disk_free=shutil.disk_usage(_existing(cache)).free,
        packages={name: version_of(name) for name in CORE_PACKAGES},
        pytorch_cuda=torch.version.cuda,
        allocator=setting() or f"{EXPANDABLE} while training",
        extras=_extras(),
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        target=str(target),
        backends=_backends(target),
    )


def _backends(target: HardwareCaps) -> list[BackendLine]:
    """Every backend on the calls that matter: the weights' two schemes, weight-only and as served, both directions."""
    device = "cuda" if target.is_cuda else "cpu"
    block = PerBlock(128, 128).tile
    problems = [
        Problem("quantize", device),
        Problem("dequantize", device),
        Problem("linear", device, m=16),
        Problem("linear", device, m=64),
        Problem("linear", device, m=4096),
        Problem("linear", device, m=4096, activation="token"),
        Problem("linear", device, m=4096, activation="group128", tile=block),
        Problem("linear_dx", device, m=4096),
        Problem("scaled_mm", device, m=4096),
    ]
    lines = []
    for problem in problems:
        choice = choose(problem, target)
        for name, backend in BACKENDS.items():
            reason = backend.refuse(problem, target)
            text = f"{problem}, activations {problem.activation}" if problem.op == "linear" else str(problem)
            chosen = name == choice.backend
            line = BackendLine(op=problem.op, name=name, problem=text, chosen=chosen, reason=reason)
            lines.append(line.model_copy(update={"kernel": choice.kernel}) if chosen else line)
    return lines + _attention(target) + _training(target, device)


def _attention(target: HardwareCaps) -> list[BackendLine]:
    """What reads an FP8 cache for a new token: a kernel, or torch after the cache was decoded."""
    reason = refused(128, torch.bfloat16, LAYER, target)
    call = {"op": "attention", "problem": "attention bfloat16, one token to an FP8 cache, heads of 128"}
    return [
        BackendLine(**call, name="codes", chosen=reason is None, reason=reason),
        BackendLine(**call, name="decoded", chosen=reason is not None, reason=None),
    ]


def _training(target: HardwareCaps, device: str) -> list[BackendLine]:
    """How LoRA over FP8 trains: decoder layers fused, where FP8 products run forward and backward."""
    products = Problem("linear", device, m=4096, activation="token"), Problem("linear_dx", device, m=4096)
    reason = next((why for problem in products if (why := BACKENDS["native"].refuse(problem, target))), None)
    call = {"op": "training", "problem": "LoRA step bfloat16, activations token"}
    return [
        BackendLine(**call, name="fused", chosen=reason is None, reason=reason),
        BackendLine(**call, name="layer by layer", chosen=reason is not None, reason=None),
    ]


def _extras() -> list[Extra]:
    found = []
    for extra, names in extras().items():
        packages = {name: version_of(name) for name in names}
        missing = None in packages.values()
        found.append(Extra(name=extra, packages=packages, install=pip_line(extra) if missing else None))
    return found


def _gpu(index: int) -> Gpu:
    caps = caps_of(f"cuda:{index}")
    free, _ = torch.cuda.mem_get_info(index)
    return Gpu(name=caps.name, tag=caps.tag, memory=caps.memory, free=free, native_fp8=caps.native_fp8)


def _existing(path: Path) -> Path:
    """The nearest folder above that exists: the cache is made on first use."""
    return path if path.exists() else _existing(path.parent)


def _cores() -> int:
    """Those this process may use, which inside a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    lines = _lines(Path("/proc/cpuinfo"))
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> tuple[int, int]:
    """(total, available), bytes; a control group's limit counts where there is one. (0, 0) where neither is told."""
    info = {line.split(":")[0]: line.split()[1] for line in _lines(Path("/proc/meminfo"))}
    total = int(info.get("MemTotal", 0)) * 1024
    free = int(info.get("MemAvailable", 0)) * 1024
    limit = "".join(_lines(Path("/sys/fs/cgroup/memory.max"))).strip()
    if limit.isdigit() and int(limit) < total:
        used = "".join(_lines(Path("/sys/fs/cgroup/memory.current"))).strip()
        total = int(limit)
        free = min(free, total - int(used)) if used.isdigit() else min(free, total)
    return total, free


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
