"""Oracles for your own tests: assert_sqnr against derived floors, and hardware you do not have."""

from __future__ import annotations

import torch

from octavo.base.hardware import HardwareCaps, caps_named
from octavo.formats.measure import sqnr_db

# dB. docs/numerics.md derives every one; all hold for any seed and for power-of-two scales too.
#   cast       quantize and dequantize, by format and family of values (the families: docs/numerics.md)
#   linear     high-precision input times quantized weight, against the unquantized weight
#   scaled_mm  both operands quantized, against both unquantized
#   rounding   a result against the exact one: one rounding to that dtype, float32 sums of up to 1024 products
#   dequant    the same where weight and input are also rounded to that dtype before the product
FLOOR_DB: dict[tuple[str, ...], float] = {
    ("cast", "e4m3", "normal"): 31.3,
    ("cast", "e4m3", "uniform"): 31.6,
    ("cast", "e4m3", "outliers"): 31.0,
    ("cast", "e5m2", "normal"): 25.3,
    ("cast", "e5m2", "uniform"): 25.6,
    ("cast", "e5m2", "outliers"): 25.2,
    ("linear", "e4m3", "normal"): 31.1,
    ("linear", "e5m2", "normal"): 25.1,
    ("scaled_mm", "e4m3", "normal"): 28.1,
    ("scaled_mm", "e5m2", "normal"): 22.1,
    ("rounding", "bfloat16"): 55.0,
    ("rounding", "float16"): 73.0,
    ("rounding", "float32"): 120.0,
    ("dequant", "bfloat16"): 50.0,
    ("dequant", "float16"): 68.0,
    ("dequant", "float32"): 120.0,
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
