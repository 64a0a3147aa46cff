"""Errors that an engine adds after loading: scales rounded to powers of two, merged shards given one scale."""

from __future__ import annotations

import math

import torch

from octavo.formats.codec import decode, encode
from octavo.formats.granularity import PerBlock
from octavo.formats.scale import is_power_of_two, power_of_two_above
from octavo.formats.spec import E4M3
from octavo.workflows.rules.engine import Plan, experts_block
from octavo.workflows.rules.findings import WRITE_ANEW, Findings
from octavo.workflows.rules.kernels import Kernel, kind_of
from octavo.workflows.rules.model import Model, Module

SAMPLED_MODULES = 4
# Below torch's grain size of 32768 elements: no thread pool is woken for it.
SAMPLED_ROWS, SAMPLED_COLUMNS = 128, 256
# E4M3 rounding of Gaussian weights, relative: 2.65 % (docs/numerics.md).
OWN_ERROR = 0.0265
RATIO_WARN = 4.0
PO2_MARK = ("UE8M0", "powers of two")


def rounds_scales(kernel: Kernel) -> bool:
    """Whether a kernel wants powers of two for block scales and makes them itself."""
    return any(mark in f"{kernel.name} {kernel.note}" for mark in PO2_MARK)


def check_po2(model: Model, plan: Plan, kernels: dict[str, Kernel], out: Findings) -> None:
    """The loss where a kernel rounds block scales up to powers of two and requantizes the weights."""
    marked = {kind for kind, kernel in kernels.items() if rounds_scales(kernel)}
    errors: list[float] = []
    odd, first = 0, ""
    for name, built in plan.modules.items():
        weights, module = built.weights, model.modules[name]
        if weights is None or weights.block is None or name in plan.refused or not module.is_matrix:
            continue
        if kind_of(weights.strategy, weights.activation, expert=module.role == "expert") not in marked:
            continue
        scale = _grid(model, module, built.scale, weights.block)
        if scale is None or bool(is_power_of_two(scale).all()):
            continue
        odd, first = odd + 1, first or module.leaves[built.scale].name
        if len(errors) < SAMPLED_MODULES:
            errors.append(_requantized(model, module, scale, weights.block))
    if odd:
        added = sum(errors) / len(errors)
        total = math.hypot(OWN_ERROR, added)
        kernel = next(iter(k.name for kind, k in kernels.items() if kind in marked))
        text = (
            f"{kernel} rounds the scales of {odd} modules up to powers of two and requantizes: measured on a sample, "
            f"{added:.1%} of error is added, about {total:.1%} in all against the 16-bit weights."
        )
        fix = "Quantize with `--scale-format po2`, which costs nothing and makes this step lossless."
        out.info("po2-requantization", first, text, fix)


def _grid(model: Model, module: Module, leaf: str, block: tuple[int, int]) -> torch.Tensor | None:
    stored, weight = module.leaves.get(leaf), module.weight
    if stored is None or weight is None or weight.dtype != torch.float8_e4m3fn or not stored.dtype.is_floating_point:
        return None
    if stored.shape != PerBlock(*block).scale_shape(weight.shape):
        return None
    scale = model.checkpoint.get(stored.name).float()
    return scale if bool((torch.isfinite(scale) & (scale > 0)).all()) else None


def _requantized(model: Model, module: Module, scale: torch.Tensor, block: tuple[int, int]) -> float:
    """Relative error of decode, round the scale up to a power of two, encode again; on the first rows."""
    codes = _sample(model, module)
    rows, cols = codes.shape
    part = scale[: -(-rows // block[0]), : -(-cols // block[1])]
    wide = PerBlock(*block).expand(part, (rows, cols))
    values = decode(codes, E4M3).nan_to_num(0.0) * wide
    new = power_of_two_above(wide)
    again = decode(encode(values / new, E4M3), E4M3) * new
    return _relative(again, values)


def _sample(model: Model, module: Module) -> torch.Tensor:
    """The codes of the first rows and columns."""
    assert module.weight is not None
    rows = min(SAMPLED_ROWS, module.weight.shape[0])
    return model.checkpoint.rows(module.weight.name, 0, rows).view(torch.uint8)[:, :SAMPLED_COLUMNS].contiguous()


def check_merged_scales(model: Model, plan: Plan, kernels: dict[str, Kernel], name: str, out: Findings) -> None:
    """Shards with one scale each are requantized with the largest; W8A16 kernels expand the scales instead."""
    if not any(kind.startswith("scalar") and k.mode == "w8a8" for kind, k in kernels.items()):
        return
    for fused, members in model.groups.items():
        built = [plan.modules.get(m.name) for m in members]
        if experts_block(fused) is not None or any(b is None or b.weights is None for b in built):
            continue
        if any(b and b.weights and b.weights.strategy != "tensor" for b in built):
            continue
        scales = [_scalar(model, m, b.scale) for m, b in zip(members, built, strict=True) if b]
        if any(s is None for s in scales):
            continue
        values = [s for s in scales if s is not None]
        ratio = max(values) / min(values)
        if ratio < 1.01:
            continue
        worst = members[values.index(min(values))]
        error = _remerged(model, worst, min(values), max(values))
        text = (
            f"{name} requantizes the merged {fused} with the largest of its {len(members)} scales; they differ by "
            f"{ratio:.3g}, which adds {error:.1%} of error to {worst.name}."
        )
        fix = f"Give merged shards one common scale, or use channel scales. {WRITE_ANEW}"
        out.add("warn" if ratio > RATIO_WARN else "info", "merged-scale-ratio", worst.name, text, fix)


def _scalar(model: Model, module: Module, leaf: str) -> float | None:
    stored = module.leaves.get(leaf)
    if stored is None or not stored.dtype.is_floating_point or stored.shape not in ((), (1,)):
        return None
    value = float(model.checkpoint.get(stored.name).float().reshape(()))
    return value if math.isfinite(value) and value > 0 else None


def _remerged(model: Model, module: Module, own: float, common: float) -> float:
    """Decode with its own scale, through float16 as engines do, and encode with the common one."""
    values = decode(_sample(model, module), E4M3).nan_to_num(0.0)
    wide = (values.half() * own).float()
    again = decode(encode(wide / common, E4M3), E4M3) * common
    return _relative(again, values * own)


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    norm = float(expected.double().norm())
    return float((actual.double() - expected.double()).norm()) / norm if norm else 0.0
