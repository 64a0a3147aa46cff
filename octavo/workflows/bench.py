"""Measure on this GPU what the documentation claims: first that results are right, then how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import torch

from octavo import __version__
from octavo.base.errors import UnsupportedError, require_type
from octavo.base.hardware import caps_of
from octavo.base.packages import version_of
from octavo.base.report import Config, Report
from octavo.workflows.measures import decode, gemm, kv, lora, w8a16
from octavo.workflows.planner.source import published

Name = Literal["w8a16", "decode", "kv", "gemm", "lora"]
MODEL = "llama-3.1-8b"


class BenchConfig(Config):
    """name: `w8a16`, products of FP8 weights with 16-bit inputs; `decode`, tokens a second of an 8B model; `kv`,
    attention to an FP8 cache; `gemm`, products with FP8 operands; `lora`, a step of fine-tuning an 8B model. quick: one
    size of each. layers: of the model that decodes or trains, 0 for all of it.
    """

    name: Name
    quick: bool = False
    layers: int = 0


class BenchReport(Report):
    """machine: hardware and versions. checked: what was compared first, in dB, the least of all cases. rows: a
    measurement each, with its rival in the same run. seconds: all of it.
    """

    name: Name
    machine: dict[str, str]
    checked: dict[str, float]
    rows: list[dict[str, Any]]
    seconds: float


def bench(config: BenchConfig) -> BenchReport:
    """Run one. UnsupportedError without a CUDA device: then nothing is measured. OctavoError where a check says no."""
    require_type("bench: config", config, BenchConfig)
    caps = caps_of()
    if not caps.is_cuda:
        fix = "Run it on a machine with an NVIDIA GPU of sm80 or later."
        raise UnsupportedError(f"bench {config.name}: not measured here", got="no CUDA device", fix=fix)
    started = time.perf_counter()
    checked = kv.check(_device()) if config.name == "kv" else {}
    rows = list(_rows(config, _device()))
    for row in rows:
        if row.get("db") is not None:
            what = str(row["what"])
            checked[what] = min(float(row["db"]), checked.get(what, float("inf")))
    return BenchReport(
        name=config.name,
        machine=machine(str(caps)),
        checked={name: round(db, 1) for name, db in checked.items()},
        rows=rows,
        seconds=round(time.perf_counter() - started, 1),
    )


def machine(device: str) -> dict[str, str]:
    """What figures depend on."""
    versions = {name: version_of(name) or "not installed" for name in ("torch", "transformers", "cuda-bindings")}
    return {"device": device, "octavo": __version__, "cuda": torch.version.cuda or "none", **versions}


def _device() -> str:
    return "cuda"


def _rows(config: BenchConfig, device: str) -> Iterator[dict[str, Any]]:
    if config.name == "w8a16":
        return w8a16.rows(device, (1, 16), w8a16.SHAPES[:1]) if config.quick else w8a16.rows(device)
    if config.name == "kv":
        return kv.rows(device, (8192,), (1,)) if config.quick else kv.rows(device)
    if config.name == "gemm":
        return gemm.rows(device, shapes=gemm.SHAPES[:1]) if config.quick else gemm.rows(device)
    shape = published()[MODEL]
    shape = shape | {"num_hidden_layers": config.layers} if config.layers else shape
    if config.name == "lora":
        return lora.rows(shape, device, list(lora.VARIANTS)[:2]) if config.quick else lora.rows(shape, device)
    if config.quick:
        return decode.rows(shape, device, ("graph bf16, kv bf16", "graph fp8, kv fp8"), (1,))
    return decode.rows(shape, device)
