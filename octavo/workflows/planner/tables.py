"""The planner's data files as typed values. Every value has its source; what is unknown is None, never 0."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from octavo.base.errors import ConfigError, did_you_mean

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """sm: `sm90`. memory: bytes that torch reports as the total. Peaks: dense TFLOP/s with FP32 accumulation, None
    where there are no such units. bandwidth: TB/s. link: nvlink or pcie, link_gbs in one direction. matmul_*: the
    best product somebody measured. memory_source: where the memory figure is from."""

    name: str
    sm: str
    memory: float
    bf16: float
    fp8: float | None
    bandwidth: float
    link: str
    link_gbs: float
    matmul_bf16: float | None
    matmul_fp8: float | None
    memory_source: str


@dataclass(frozen=True)
class Machine:
    """What can be had: an instance type, or GPUs one already owns (name empty). ram: bytes of the host, None: unknown.
    network: Gbit/s of an instance. price: USD an hour of one, None: unknown."""

    name: str
    gpu: Gpu
    gpus: int
    ram: float | None = None
    network: float | None = None
    price: float | None = None


@dataclass(frozen=True)
class Factor:
    """A constant of the models with its bounds. kind: measured or estimated. source: in words."""

    value: float
    low: float
    high: float
    kind: str
    source: str


@dataclass(frozen=True)
class Backend:
    """How Octavo's own kernels of one kind run FP8 linears. products: `fp8` or `16bit`. rounded: whether they take
    only inputs that are rounded to FP8.

    scratch_*: bytes for a moment; moved_*: bytes that are read and written beside the product. result: per value of a
    linear's result, weight: of the weight forward, weight_backward: in dX, input: of inputs and gradients, round: of
    what training in FP8 rounds. launches, launches_round: of one linear, of one rounding. source: counted, or read off.
    """

    name: str
    products: str
    rounded: bool
    scratch_result: float
    scratch_weight: float
    scratch_weight_backward: float
    scratch_round: float
    moved_result: float
    moved_weight: float
    moved_weight_backward: float
    moved_input: float
    moved_round: float
    launches: float
    launches_round: float
    source: str


@cache
def load(name: str) -> dict[str, Any]:
    """A data file of this folder."""
    text = resources.files("octavo.workflows.planner").joinpath(f"{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@cache
def gpus() -> dict[str, Gpu]:
    table = load("gpus")
    found = {}
    for name, entry in table["gpus"].items():
        v = {key: cell["value"] for key, cell in entry.items()}
        source = table["sources"][entry["memory_gib"]["source"]]
        found[name] = Gpu(
            name,
            v["sm"],
            v["memory_gib"] * GIB,
            v["bf16_tflops"],
            v["fp8_tflops"],
            v["bandwidth_tbs"],
            v["link"],
            v["link_gbs"],
            v["matmul_bf16_tflops"],
            v["matmul_fp8_tflops"],
            f"{source['what']}, {source['date']}",
        )
    return found


def gpu_named(text: str) -> Gpu:
    """`h200`, `A100-80GB`, or as drivers say it, `NVIDIA H100 80GB HBM3`. ConfigError names the nearest:
    an unknown GPU is never taken for another."""
    name = re.sub(r"nvidia|geforce|blackwell server edition|sxm\d?|hbm\d\w?|gb\b|[^a-z0-9]", "", text.lower())
    compact = {known.replace("-", ""): known for known in gpus()} | {"h10080": "h100"}
    key = compact.get(name)
    if key is None:
        sizes = [known for known in gpus() if name and known.startswith(f"{name}-")]
        fix = f"Say which: {', '.join(sizes)}." if sizes else did_you_mean(name, gpus())
        raise ConfigError(f"GPU '{text}' is unknown to the planner", fix=fix)
    return gpus()[key]


def instances(globs: Iterable[str], spot: bool, prices: dict[str, float]) -> list[Machine]:
    """Instance types that match any of the globs; all for none. prices: USD an hour that win over the table's."""
    table = load("instances")["instances"]
    globs = list(globs)
    for pattern in globs:
        if not any(fnmatch.fnmatchcase(name, _glob(pattern)) for name in table):
            raise ConfigError(f"no instance type fits '{pattern}'", fix=did_you_mean(pattern, table))
    found = []
    for name, entry in table.items():
        if globs and not any(fnmatch.fnmatchcase(name, _glob(pattern)) for pattern in globs):
            continue
        v = {key: cell["value"] for key, cell in entry.items()}
        price = prices.get(name, v["spot_usd"] if spot else v["on_demand_usd"])
        found.append(Machine(name, gpus()[v["gpu"]], v["gpus"], v["ram_gib"] * GIB, v["network_gbps"], price))
    return found


def priced(name: str) -> str:
    """The instance type, or the GPU, that a price is given for. ConfigError where there is no such thing."""
    known = [*load("instances")["instances"], *gpus()]
    if (key := _glob(name)) not in known:
        raise ConfigError(f"prices: '{name}' is no instance type and no GPU", fix=did_you_mean(key, known))
    return key


def _glob(pattern: str) -> str:
    return pattern.lower().removeprefix("ml.")


@cache
def backend(name: str) -> Backend:
    """A row of capability.json."""
    return Backend(name=name, **load("capability")["backends"][name])


@cache
def factor(name: str) -> Factor:
    table = load("calibration")
    entry = table["factors"][name]
    return Factor(entry["value"], entry["low"], entry["high"], entry["kind"], table["sources"][entry["source"]]["what"])


def rate(gpu: Gpu, name: str) -> float | None:
    """A rate measured on this very GPU, or None."""
    entry = load("calibration")["rates"].get(gpu.name, {}).get(name)
    return None if entry is None else float(entry["value"])
