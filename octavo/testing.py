"""Oracles for your own tests: assert_sqnr against derived floors, and hardware you do not have."""

from __future__ import annotations

import torch

from octavo.base.hardware import HardwareCaps, caps_named
from octavo.formats.measure import sqnr_db

# dB, by (what, spec, input family). docs/numerics.md derives every one.
FLOOR_DB: dict[tuple[str, ...], float] = {
    ("cast", "e4m3", "normal"): 31.0,
    ("cast", "e5m2", "normal"): 25.0,
    ("linear", "e4m3", "normal"): 31.0,
    ("linear", "e5m2", "normal"): 25.0,
    ("scaled_mm", "e4m3", "normal"): 28.0,
    ("scaled_mm", "e5m2", "normal"): 22.0,
    ("rounding", "bfloat16"): 55.0,
    ("rounding", "float16"): 73.0,
    ("rounding", "float32"): 120.0,
}


def assert_sqnr(actual: torch.Tensor, expected: torch.Tensor, floor_db: float, what: str = "") -> float:
    """AssertionError unless 10 log10(|expected|^2 / |actual - expected|^2) reaches floor_db. Returns the dB.

    NaN or Inf in `actual`, or another shape, fail whatever the floor.
    """
    prefix = f"{what}: " if what else ""
    if actual.shape != expected.shape:
        raise AssertionError(f"{prefix}shape {list(actual.shape)}, expected {list(expected.shape)}")
    found = sqnr_db(actual, expected)
    if not found >= floor_db:
        raise AssertionError(f"{prefix}{found:.2f} dB, floor {floor_db:.2f} dB")
    return found


def fake_caps(gpu: str, memory_gib: float = 80.0) -> HardwareCaps:
    """The caps of a GPU by name or compute capability (`h100`, `sm80`, `cpu`): kernel choice needs nothing else."""
    caps = caps_named(gpu)
    return HardwareCaps(caps.sm, caps.name, int(memory_gib * 2**30)) if caps.is_cuda else caps
