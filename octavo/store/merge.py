"""Adapters onto weights, while a checkpoint streams by: the edit of a conversion, and how much of it survives.

For a layer with base weights W as they were before the merge, change d and exported weights E (codes times scales, or
16-bit values): kept = <E - W, d> / <d, d>. It is a projection: noise that rounding adds evens out over a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from octavo.base.report import Report
from octavo.formats.architectures import fused_group
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe, Rule
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.scale import scale_of
from octavo.formats.scaled import ScaledTensor
from octavo.store.adapter import LoraPair
from octavo.store.tensors import Checkpoint

ROWS = 512


class LayerKept(Report):
    """kept: <D(q) - base, d> / <d, d> for the adapter's change d; 1 is all of it, rounding may add to it or take away.

    output_cosine: between the outputs of the exported layer and of base + d unrounded. change: |d| / |base|.
    """

    module: str
    precision: str
    kept: float | None
    output_cosine: float
    change: float


@dataclass
class _Sums:
    """Inner products over a layer, in float64: e = exported - (base + d), y and z outputs of base + d and exported."""

    precision: str = "fp8"
    e_d: float = 0.0
    d_d: float = 0.0
    w_w: float = 0.0
    y_z: float = 0.0
    y_y: float = 0.0
    z_z: float = 0.0

    @property
    def kept(self) -> float | None:
        return 1 + self.e_d / self.d_d if self.d_d else None

    @property
    def output_cosine(self) -> float:
        norm = math.sqrt(self.y_y * self.z_z)
        return self.y_z / norm if norm else 1.0


@dataclass
class Survival:
    """Sums per layer, and over all of them."""

    PROBES: ClassVar[int] = 16
    sums: dict[str, _Sums] = field(default_factory=dict)
    _probes: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, module: str, merged: torch.Tensor, exported: torch.Tensor, delta: torch.Tensor) -> None:
        """Rows of a layer, each [rows, K]: base + delta in float32, what is exported, and the delta."""
        sums = self.sums.setdefault(module, _Sums())
        merged, exported = merged.float(), exported.float()
        y, z = merged @ self._probe(merged.shape[1]), exported @ self._probe(merged.shape[1])
        sums.e_d += _dot(exported - merged, delta)
        sums.d_d += _dot(delta, delta)
        base = merged - delta
        sums.w_w += _dot(base, base)
        sums.y_z += _dot(y, z)
        sums.y_y += _dot(y, y)
        sums.z_z += _dot(z, z)

    @property
    def kept(self) -> float | None:
        """Over all layers, each weighing as much as its change; None without any change."""
        return self._total().kept

    @property
    def output_cosine(self) -> float | None:
        """Over the outputs of all layers; None without any layer."""
        return self._total().output_cosine if self.sums else None

    def layers(self) -> list[LayerKept]:
        """One record a layer, by name."""
        return [
            LayerKept(
                module=module,
                precision=sums.precision,
                kept=sums.kept,
                output_cosine=sums.output_cosine,
                change=math.sqrt(sums.d_d / sums.w_w) if sums.w_w else 0.0,
            )
            for module, sums in sorted(self.sums.items())
        ]

    def _total(self) -> _Sums:
        total = _Sums()
        for sums in self.sums.values():
            for name in ("e_d", "d_d", "w_w", "y_z", "y_y", "z_z"):
                setattr(total, name, getattr(total, name) + getattr(sums, name))
        return total

    def _probe(self, width: int) -> torch.Tensor:
        if width not in self._probes:
            generator = torch.Generator().manual_seed(width)
            self._probes[width] = torch.randn(width, self.PROBES, generator=generator)
        return self._probes[width]


class Merge:
    """`edit` and `observe` of store.conversion.convert_checkpoint.

    pairs: tensor name -> what is added to it. requantized_base: add to the weights as they are after quantization by
    `recipe`, not to the original ones.
    """

    def __init__(self, source: Checkpoint, pairs: Mapping[str, LoraPair], recipe: Recipe, layout: str) -> None:
        self.source, self.pairs = source, pairs
        self.requantized_base = False
        self.survival = Survival()
        decisions = recipe.assign(source.shapes(), layout=layout, layers=source.layers)
        self._rules = {module: decision.rule for module, decision in decisions.items()}

    def edit(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """weight + delta in float32, or the same object where there is no adapter."""
        pair = self.pairs.get(name)
        if pair is None:
            return weight
        module = name.removesuffix(".weight")
        rule = self._rules.get(module)
        if self.requantized_base and rule is not None:
            weight = dequantize_ref(quantize_by(weight, rule, self._shared_scale(module, rule)))
        merged = weight.float() + pair.delta()
        if rule is None:
            stored = merged.to(self.source.dtype(name))
            for start in range(0, len(merged), ROWS):
                part = slice(start, start + ROWS)
                self.survival.add(module, merged[part], stored[part], pair.delta(start, start + ROWS))
            self.survival.sums[module].precision = "16bit"
        return merged

    def observe(self, module: str, start: int, before: torch.Tensor, after: ScaledTensor) -> None:
        """A slice of a quantized layer, before and after rounding."""
        pair = self.pairs.get(f"{module}.weight")
        if pair is not None:
            self.survival.add(module, before, dequantize_ref(after), pair.delta(start, start + len(before)))

    def _shared_scale(self, module: str, rule: Rule) -> torch.Tensor | None:
        """Scales per tensor are common to fused siblings, of the base as of the export."""
        if not isinstance(rule.granularity, PerTensor):
            return None
        group = (fused_group(module) or ("", (module,)))[1]
        weights = [self.source.get(f"{m}.weight") for m in group if f"{m}.weight" in self.source]
        amax = torch.stack([rule.granularity.amax(weight) for weight in weights]).max()
        return scale_of(amax, rule.spec, rule.scale_format)


def quantize_by(x: torch.Tensor, rule: Rule, scale: torch.Tensor | None = None) -> ScaledTensor:
    """quantize_ref with the settings of a rule; rounding to nearest."""
    return quantize_ref(x, rule.spec, rule.granularity, method=rule.method, scale_format=rule.scale_format, scale=scale)


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
