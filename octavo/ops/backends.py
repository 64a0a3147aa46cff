"""Which kernel runs: a pure function of (problem, hardware, table), and the words for why.

A backend either takes a problem or refuses it with its reasons. `auto` takes the first of the table's order that does
not refuse; a backend asked for by name either runs or is an UnsupportedError that lists every reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from octavo.base.env import env
from octavo.base.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.base.hardware import HardwareCaps, caps_named, caps_of
from octavo.base.packages import pip_line, version_of
from octavo.formats.granularity import from_tile
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.kernels.plans import SHARED, Gpu, Operands, Tokens, gpu_named, plan_product
from octavo.kernels.tiling import MAX_TOKEN_WIDTH, MAX_TOKENS

TABLE_VERSION = 2
OPS = ("quantize", "dequantize", "linear", "linear_dx", "scaled_mm")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Problem:
    """One call: the operation, the torch device type, the dtype of its float side, and what the 8-bit side is.

    tile: `Granularity.tile` of the quantized operand. m, n, k: rows of x, rows of the weight, contracted length; for
    quantize and dequantize n x k is the tensor.
    """

    op: str
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    spec: str = "e4m3"
    tile: tuple[int, int] = (1, 0)
    activation: str = "none"
    m: int = 1
    n: int = 4096
    k: int = 4096

    def __str__(self) -> str:
        size = f"{self.n}x{self.k}" if self.op in ("quantize", "dequantize") else f"M={self.m} N={self.n} K={self.k}"
        return f"{self.op} {self.spec} {from_tile(*self.tile)} {str(self.dtype).removeprefix('torch.')} {size}"


class Kernels(Protocol):
    """What a backend's module offers. Matrices are 2-D; every result is contiguous."""

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None, rule: Rule) -> ScaledTensor: ...

    def dequantize(self, q: ScaledTensor, dtype: torch.dtype) -> torch.Tensor: ...

    def linear(
        self,
        x: torch.Tensor,
        w: ScaledTensor,
        bias: torch.Tensor | None,
        activation: str,
        input_scale: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def linear_dx(self, grad: torch.Tensor, w: ScaledTensor) -> torch.Tensor: ...

    def scaled_mm(self, a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True)
class Backend:
    """name: for tables and messages. refuse: every reason against, or None. module: the home of its `ops`."""

    name: str
    refuse: Callable[[Problem, HardwareCaps], str | None]
    module: str
    ops: tuple[str, ...] = OPS

    def load(self) -> Kernels:
        return cast(Kernels, import_module(self.module))


@dataclass(frozen=True)
class Choice:
    """The backend that runs `problem` on `caps`, and why each one before it in the order does not."""

    problem: Problem
    caps: HardwareCaps
    backend: str
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def kernel(self) -> str:
        """How backend w8a16 multiplies; empty for others."""
        problem, sm = self.problem, self.caps.sm
        if self.backend != "w8a16" or problem.op != "linear":
            return ""
        scales = {(0, 0): 0, (1, 0): 1}.get(problem.tile, 2)
        operands = Operands(problem.dtype == torch.bfloat16, problem.spec == "e4m3", scales)
        return plan_product(problem.m, problem.n, problem.k, operands, gpu_named(sm), tokens_on(sm)).why

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.caps}: {self.backend}" + (f", {self.kernel}" if self.kernel else "")]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refused])


def choose(problem: Problem, caps: HardwareCaps, table: dict[str, Any] | None = None, backend: str = "auto") -> Choice:
    """Pure: needs no device. ConfigError for an unknown backend, UnsupportedError where none, or not that one, can."""
    order = _order(problem, caps, table or load_table()) if backend == "auto" else [backend]
    refused: list[tuple[str, str]] = []
    for name in order:
        if name not in BACKENDS:
            raise ConfigError(f"backend '{name}' is unknown", fix=did_you_mean(name, ["auto", *BACKENDS]))
        reason = BACKENDS[name].refuse(problem, caps)
        if reason is None:
            return Choice(problem, caps, name, tuple(refused))
        refused.append((name, reason))
    what = "no backend" if backend == "auto" else f"backend '{backend}'"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    able = [name for name in BACKENDS if BACKENDS[name].refuse(problem, caps) is None]
    fix = f"Use backend='auto' or one of: {', '.join(able)}." if able else ""
    raise UnsupportedError(f"{what} for {problem} on {caps}", got=reasons, fix=fix)


def why(
    op: str = "linear",
    *,
    m: int = 1,
    n: int = 4096,
    k: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    rule: Rule | None = None,
    activation: str = "none",
    device: torch.device | str | None = None,
    gpu: str | None = None,
    backend: str = "auto",
) -> Choice:
    """Which kernel an operation would take and the reason against every other; print it.

    m, n, k: rows of x, rows of the weight, contracted length. device: a torch device here (default: the first GPU,
    else the CPU); gpu: a GPU by name or compute capability instead, one that need not be here.
    """
    if op not in OPS:
        raise ConfigError(f"operation '{op}' is unknown", fix=did_you_mean(op, OPS))
    caps = caps_named(gpu) if gpu else caps_of(device)
    kind = torch.device(device).type if device is not None and not gpu else ("cuda" if caps.is_cuda else "cpu")
    rule = rule or Rule()
    tile = rule.granularity.tile
    return choose(Problem(op, kind, dtype, rule.spec.name, tile, activation, m, n, k), caps, backend=backend)


@lru_cache(maxsize=8192)
def kernels(problem: Problem, device: torch.device, backend: str) -> Kernels:
    """The kernels for a real call. Cached: the choice costs nothing from the second call of a shape on."""
    return BACKENDS[choose(problem, caps_of(device), backend=backend).backend].load()


@cache
def load_table() -> dict[str, Any]:
    """The order in which `auto` asks, per operation and device: a data file, replaced when measurements change."""
    table = json.loads((Path(__file__).parent / "table.json").read_text(encoding="utf-8"))
    return check_table(table)


def check_table(table: dict[str, Any]) -> dict[str, Any]:
    """A table of this version, or a ConfigError."""
    if table.get("version") != TABLE_VERSION:
        raise ConfigError("backend table", got=f"version {table.get('version')}", need=f"version {TABLE_VERSION}")
    for row in table["rows"]:
        for name in row["order"]:
            if name not in BACKENDS:
                raise ConfigError(f"backend table names '{name}'", fix=did_you_mean(name, BACKENDS))
    return table


@cache
def tokens_on(sm: tuple[int, int]) -> Tokens:
    """Up to how many tokens backend w8a16 takes each of its ways, by the table."""
    rows = load_table()["w8a16"]
    return Tokens(**(rows.get(f"sm{sm[0]}{sm[1]}") or rows["*"]))


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Where kernels are forced to an architecture, a GPU of that one. Off the GPU an imagined SM80 (tests)."""
    from octavo.kernels.cuda import loader

    multiprocessors, shared = loader.limits(device)
    forced = env().arch
    sm = (int(forced[:-1]), int(forced[-1])) if forced else caps_of(device).sm if device.type == "cuda" else (8, 0)
    return Gpu(sm, multiprocessors, min(shared, SHARED.get(sm, shared)))


def _order(problem: Problem, caps: HardwareCaps, table: dict[str, Any]) -> list[str]:
    for row in table["rows"]:
        if row["op"] in ("*", problem.op) and row["device"] in ("*", problem.device, caps.tag):
            return list(row["order"])
    raise ConfigError("backend table", got=f"no row for {problem.op} on {problem.device}", need="a row that matches")


def _refuse_cpu(problem: Problem, caps: HardwareCaps) -> str | None:
    reasons = []
    if problem.device != "cpu":
        reasons.append(f"runs on CPU tensors, these are on {problem.device}")
    if problem.dtype not in FLOATS:
        reasons.append(f"computes in float32, asked for {problem.dtype}")
    return "; ".join(reasons) or None


def _refuse_dequant(problem: Problem, caps: HardwareCaps) -> str | None:
    reasons = []
    if problem.device == "cpu":
        reasons.append("made for GPUs: a CPU is faster in float32")
    if problem.dtype not in FLOATS:
        reasons.append(f"multiplies in 16 bit or float32, asked for {problem.dtype}")
    if problem.dtype == torch.bfloat16 and caps.is_cuda and caps.sm < (8, 0):
        reasons.append(f"bfloat16 needs sm80 or later, this is {caps.tag}")
    return "; ".join(reasons) or None


def _refuse_w8a16(problem: Problem, caps: HardwareCaps) -> str | None:
    reasons = refuse_kernels(problem, caps, (8, 0))
    if problem.op not in ("linear", "linear_dx", "dequantize"):
        reasons.append(f"multiplies and decodes weights, asked for {problem.op}")
    if problem.activation != "none":
        reasons.append(f"takes inputs as they are, asked to quantize them per {problem.activation}")
    if problem.tile not in ((0, 0), (1, 0), (128, 128)):
        reasons.append(f"has scales per tensor, row or block128x128, not {from_tile(*problem.tile)}")
    most = max(MAX_TOKENS, tokens_on(caps.sm).tile)
    if problem.spec == "e5m2" and (problem.op != "linear" or problem.m > most or problem.k % 16):
        reasons.append(f"E5M2 only for {most} tokens or fewer and K a multiple of 16")
    return "; ".join(reasons) or None


def _refuse_native(problem: Problem, caps: HardwareCaps) -> str | None:
    reasons = refuse_kernels(problem, caps, (8, 9))
    block = problem.tile == (128, 128)
    if problem.op == "quantize":
        if problem.tile not in ((0, 0), (1, 0), (1, 128)) or problem.spec != "e4m3":
            reasons.append(
                f"quantizes to e4m3 per tensor, row or group128, not {problem.spec} {from_tile(*problem.tile)}"
            )
        if problem.k % 8 or (problem.tile == (1, 0) and problem.k > MAX_TOKEN_WIDTH):
            reasons.append(f"rows of a multiple of 8 values, {MAX_TOKEN_WIDTH} at most per row, not {problem.k}")
        return "; ".join(reasons) or None
    if problem.op == "dequantize":
        reasons.append("multiplies, asked to decode")
    if problem.dtype != torch.bfloat16:
        reasons.append(f"cuBLAS writes bfloat16 here, asked for {problem.dtype}")
    multiple = 128 if block else 16
    if problem.n % multiple or problem.k % multiple:
        reasons.append(f"N and K multiples of {multiple}, not {problem.n} and {problem.k}")
    if block and problem.m % 4:
        reasons.append(f"rows of x a multiple of 4 with block scales, not {problem.m}")
    if problem.tile not in ((0, 0), (1, 0), (128, 128)) or (block and (problem.op == "linear_dx" or caps.sm != (9, 0))):
        reasons.append(f"scales per tensor or row, block128x128 forward on sm90, not {from_tile(*problem.tile)}")
    wanted = ("group128",) if block else ("static", "token")
    if problem.op == "linear" and problem.activation not in wanted:
        reasons.append(f"activations {' or '.join(wanted)} with these weights, not {problem.activation}")
    if problem.spec != "e4m3":
        reasons.append(f"weights in e4m3, not {problem.spec}")
    return "; ".join(reasons) or None


def refuse_kernels(problem: Problem, caps: HardwareCaps, least: tuple[int, int]) -> list[str]:
    """What every backend of our own CUDA kernels needs."""
    reasons = []
    if problem.device != "cuda" or caps.sm < least:
        reasons.append(f"needs a CUDA device of sm{least[0]}{least[1]} or later, this is {caps.tag}")
    if problem.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"16-bit inputs, these are {problem.dtype}")
    if not (problem.m and problem.n and problem.k):
        reasons.append(f"nothing to do for M={problem.m} N={problem.n} K={problem.k}")
    missing = [name for name in ("cuda-core", "cuda-bindings") if version_of(name) is None]
    if missing:
        reasons.append(f"compiles with {' and '.join(missing)}, which is not installed: {pip_line('gpu')}")
    elif caps.cuda and (compiler := int((version_of("cuda-bindings") or "0").split(".")[0])) > caps.cuda:
        reasons.append(f"compiles for CUDA {compiler}, the driver runs CUDA {caps.cuda}: update it")
    return reasons


def _never(problem: Problem, caps: HardwareCaps) -> str | None:
    return None


BACKENDS = {
    "cpu": Backend("cpu", _refuse_cpu, "octavo.ops.cpu"),
    "w8a16": Backend("w8a16", _refuse_w8a16, "octavo.ops.w8a16", ("linear", "linear_dx", "dequantize")),
    "native": Backend("native", _refuse_native, "octavo.ops.native", ("quantize", "linear", "linear_dx", "scaled_mm")),
    "dequant": Backend("dequant", _refuse_dequant, "octavo.ops.dequant"),
    "reference": Backend("reference", _never, "octavo.ops.reference"),
}
