"""Adapters onto weights, while a checkpoint streams by: the edit of a conversion, and how much of it survives.

For a layer with base weights W as they were before the merge, change d and exported weights E (codes times scales, or
16-bit values): kept = <E - W, d> / <d, d>. It is a projection: noise that rounding adds evens out over a layer. With H,
the second moments of the layer's inputs, the same of its outputs: <a, b> is then tr(a H b^T), a sum over calibration
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from octavo.base.report import Report
from octavo.formats.architectures import fused_group
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.scale import scale_of
from octavo.formats.scaled import ScaledTensor
from octavo.store.adapter import LoraPair
from octavo.store.moments import Moments
from octavo.store.tensors import Checkpoint

ROWS = 512


class Kept(Report):
    """kept: <D(q) - base, d> / <d, d> for the adapter's change d; 1 is all of it, rounding may add to it or take away.

    Of outputs on calibration inputs, None without them: output_kept, the same share; output_error: the error that
    rounding makes, as a share of what the adapter changes; output_cosine: with the outputs of base + d unrounded.
    """

    kept: float | None
    output_kept: float | None = None
    output_error: float | None = None
    output_cosine: float | None = None

    def figures(self) -> tuple[float | None, ...]:
        """In the order of the fields."""
        return (self.kept, self.output_kept, self.output_error, self.output_cosine)


class LayerKept(Kept):
    """One layer. precision: fp8 or 16bit. change: |d| / |base|, of the weights."""

    module: str
    precision: str
    change: float


@dataclass
class _Sums:
    """Inner products over a layer, in float64: e = exported - (base + d), w = base, and y = base + d.

    h_: of outputs on calibration inputs.
    """

    precision: str = "fp8"
    e_d: float = 0.0
    d_d: float = 0.0
    w_w: float = 0.0
    h_e_d: float = 0.0
    h_d_d: float = 0.0
    h_e_e: float = 0.0
    h_e_y: float = 0.0
    h_y_y: float = 0.0

    def figures(self) -> Kept:
        kept = 1 + self.e_d / self.d_d if self.d_d else None
        if not self.h_d_d:
            return Kept(kept=kept)
        z_z = self.h_y_y + 2 * self.h_e_y + self.h_e_e
        norm = math.sqrt(max(self.h_y_y * z_z, 0.0))
        return Kept(
            kept=kept,
            output_kept=1 + self.h_e_d / self.h_d_d,
            output_error=math.sqrt(max(self.h_e_e, 0.0) / self.h_d_d),
            output_cosine=(self.h_y_y + self.h_e_y) / norm if norm else 1.0,
        )


@dataclass
class Survival:
    """Sums per layer, and over all of them."""

    sums: dict[str, _Sums] = field(default_factory=dict)

    def add(
        self,
        module: str,
        merged: torch.Tensor,
        exported: torch.Tensor,
        delta: torch.Tensor,
        moments: torch.Tensor | None = None,
    ) -> None:
        """Rows of a layer, each [rows, K]: base + delta in float32, what is exported, and the delta.

        moments: float32 [K, K] of the layer's inputs, if they are known.
        """
        sums = self.sums.setdefault(module, _Sums())
        merged = merged.float()
        error, base = exported.float() - merged, merged - delta
        sums.e_d += _dot(error, delta)
        sums.d_d += _dot(delta, delta)
        sums.w_w += _dot(base, base)
        if moments is None:
            return
        error_h, delta_h = error @ moments, delta @ moments
        sums.h_e_d += _dot(error_h, delta)
        sums.h_d_d += _dot(delta_h, delta)
        sums.h_e_e += _dot(error_h, error)
        sums.h_e_y += _dot(error_h, merged)
        sums.h_y_y += _dot(merged @ moments, merged)

    def total(self) -> Kept:
        """Over all layers: each weighs as much as its change, and as its outputs."""
        total = _Sums()
        for sums in self.sums.values():
            for name in ("e_d", "d_d", "w_w", "h_e_d", "h_d_d", "h_e_e", "h_e_y", "h_y_y"):
                setattr(total, name, getattr(total, name) + getattr(sums, name))
        return total.figures()

    def layers(self) -> list[LayerKept]:
        """One record a layer, by name."""
        return [
            LayerKept(
                module=module,
                precision=sums.precision,
                change=math.sqrt(sums.d_d / sums.w_w) if sums.w_w else 0.0,
                **sums.figures().model_dump(),
            )
            for module, sums in sorted(self.sums.items())
        ]


class Merge:
    """`edit` and `observe` of store.conversion.convert_checkpoint.

    pairs: tensor name -> what is added to it. requantized_base: add to the weights as they are after quantization by
    `recipe`, not to the original ones. moments: of the inputs, to measure the outputs by.
    survival: of what is exported; nearest: of rounding to nearest, where the recipe rounds with compensation.
    """

    def __init__(
        self,
        source: Checkpoint,
        pairs: Mapping[str, LoraPair],
        recipe: Recipe,
        layout: str,
        moments: Moments | None = None,
    ) -> None:
        self.source, self.pairs, self.moments = source, pairs, moments
        self.requantized_base = False
        self.survival, self.nearest = Survival(), Survival()
        self._last: tuple[str, torch.Tensor] | None = None
        decisions = recipe.assign(source.shapes(), layout=layout, layers=source.layers, config=source.text_config)
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
                for survival in (self.survival, self.nearest):
                    delta = pair.delta(start, start + ROWS)
                    survival.add(module, merged[part], stored[part], delta, self._moments_of(module))
            self.survival.sums[module].precision = "16bit"
        return merged

    def observe(self, module: str, start: int, before: torch.Tensor, after: ScaledTensor) -> None:
        """A slice of a quantized layer, before and after rounding."""
        pair = self.pairs.get(f"{module}.weight")
        if pair is None:
            return
        delta, h = pair.delta(start, start + len(before)), self._moments_of(module)
        self.survival.add(module, before, dequantize_ref(after), delta, h)
        rule = self._rules[module]
        if rule is not None and rule.rounding != "nearest":
            shared = isinstance(rule.granularity, PerTensor)  # any other scale nearest finds for itself
            scale = after.scale if shared else None
            self.nearest.add(module, before, dequantize_ref(quantize_by(before, rule, scale)), delta, h)

    def _moments_of(self, module: str) -> torch.Tensor | None:
        """Read once for the slices of a module and for its siblings."""
        if self.moments is None or module not in self.moments:
            return None
        key = self.moments.key(module)
        if self._last is None or self._last[0] != key:
            self._last = (key, self.moments.get(module))
        return self._last[1]

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
    method = rule.rounded("nearest").method
    return quantize_ref(x, rule.spec, rule.granularity, method=method, scale_format=rule.scale_format, scale=scale)


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
