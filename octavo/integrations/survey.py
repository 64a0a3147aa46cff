"""Which linears of a decoder train on the fused FP8 path, and why the others do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from octavo.base.hardware import HardwareCaps, caps_of
from octavo.formats.granularity import Granularity, PerBlock
from octavo.integrations.fused import projection_of
from octavo.integrations.layers import Layout, layers_of
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.backends import BACKENDS, Problem


@dataclass(frozen=True)
class Survey:
    """FP8 linears of a decoder, experts as three each; how many train fused; the commonest reason of the others."""

    fused: int
    total: int
    reason: str

    @property
    def share(self) -> str:
        return f"{self.fused} of {self.total} FP8 linears multiply in FP8, forward and backward"

    def __str__(self) -> str:
        rest = f"; the others run one by one: {self.reason}" if self.reason else ""
        return f"training: {self.share}{rest}" if self.fused else f"training layer by layer: {self.reason}"


def survey(layers: nn.Module, gpu: HardwareCaps | None = None) -> Survey:
    """What the linears of a decoder would do in a step of training, with the adapters they have or none.

    gpu: one that need not be here; None: where the weights are.
    """
    modules = list(layers.modules())
    linears = sum(isinstance(module, FrozenFloat8Linear) for module in modules)
    total = linears + sum(3 * module.num_experts for module in modules if isinstance(module, FrozenFloat8Experts))
    found = _reasons(layers, gpu, adapted=any(isinstance(module, BaseTunerLayer) for module in modules))
    fused = found.count(None)
    if fused == total:
        return Survey(fused, total, "" if total else "no linear in FP8")
    if fused and total > linears:
        return Survey(fused, total, "experts run one by one")
    counts = Counter(reason for reason in found if reason)
    kind = getattr(getattr(layers, "config", None), "model_type", type(layers).__name__)
    reason = counts.most_common(1)[0][0] if counts else f"decoder '{kind}' runs layer by layer"
    return Survey(fused, total, reason)


def _reasons(layers: nn.Module, gpu: HardwareCaps | None, adapted: bool) -> list[str | None]:
    """Of every linear of a known decoder: the reason why it is not fused, or None."""
    layout, found = Layout.of(layers), list[str | None]()
    embeddings = next((p.dtype for p in layers.parameters() if p.is_floating_point()), torch.bfloat16)
    for layer in layers_of(layers) if layout else ():
        for norm, group in layout.groups(layer) if layout else ():
            trains = adapted and norm is not None and any(p.requires_grad for p in norm.parameters())
            for linear in group:
                reason = _why_not(linear, gpu)
                if reason is None and embeddings != torch.bfloat16:
                    reason = f"a model in {embeddings}, not bfloat16"
                found.append(reason or ("a norm that trains" if trains else None))
    return found


def _why_not(layer: nn.Module, gpu: HardwareCaps | None) -> str | None:
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    if isinstance(layer, BaseTunerLayer) and base is layer:
        return f"adapters of PEFT's {type(layer).__module__.split('.')[2]}"
    if not isinstance(base, FrozenFloat8Linear):
        return "linears in 16 bit"
    granularity = base.rule.granularity
    ops = ("linear",) if isinstance(granularity, PerBlock) else ("linear", "linear_dx")  # blocks take another way back
    for op in ops:
        if reason := refused(base, op, granularity, base.activation, gpu):
            return reason
    if isinstance(layer, LoraLinear) and len(layer.active_adapters) > 1:
        return "several adapters at once"
    return None if projection_of(layer) is not None else f"adapters or hooks of {type(layer).__name__}"


def refused(
    base: FrozenFloat8Linear, op: str, granularity: Granularity, activation: str, gpu: HardwareCaps | None = None
) -> str | None:
    """Why FP8 products of a linear refuse these scales and this rounding of inputs, or None."""
    n, k = base.weight.shape
    caps = gpu or caps_of(base.weight.device)
    device = "cuda" if caps.is_cuda else "cpu"
    problem = Problem(op, device, tile=granularity.tile, activation=activation, m=4, n=n, k=k)
    return BACKENDS["native"].refuse(problem, caps)
