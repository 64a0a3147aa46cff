"""Weights into codes while they stream: one tensor at a time, in slices, fused siblings with their common scale."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import nn

from octavo.base.errors import CheckpointError
from octavo.formats.architectures import fused_group
from octavo.formats.granularity import PerTensor
from octavo.formats.rule import Rule
from octavo.formats.scale import scale_of
from octavo.formats.scaled import ScaledTensor
from octavo.integrations.load_plan import LoadPlan, ModulePlan
from octavo.modules.frozen import FrozenParameter
from octavo.ops.quantize import quantize
from octavo.ops.rounding import SLICE as COMPENSATED_SLICE
from octavo.ops.rounding import Compensator
from octavo.store.scales import Scales
from octavo.store.schema import read_scaled
from octavo.store.tensors import Checkpoint

# Values at a time: on a CPU few enough for its cache.
SLICES = {"cpu": 1 << 19}
SLICE = 1 << 24
# Bytes of codes after which memory that the C library holds back is returned: among codes that stay, temporaries leave
# holes, and the heap would grow to twice the size of the model.
TRIM_EVERY = 1 << 26

Tensors = dict[str, torch.Tensor]


def quantize_in_slices(
    x: torch.Tensor,
    rule: Rule,
    name: str,
    scale: torch.Tensor | None = None,
    *,
    solve: Compensator | None = None,
    module: str = "",
) -> ScaledTensor:
    """`octavo.quantize` of a matrix [N, K], in row slices: the same codes and scales, and memory that does not grow.

    solve: rounds with the moments of `module` where the rule asks for it. CheckpointError names the tensor if it holds
    NaN or Inf.
    """
    if rule.method == "absmax" and isinstance(rule.granularity, PerTensor) and scale is None:
        scale = scale_of(amax_in_slices([x], name), rule.spec, rule.scale_format)
    if not x.numel():
        return quantize(x, rule, scale=scale)
    tile = rule.granularity.tile[0]
    compensated = solve is not None and rule.rounding != "nearest"
    step = max(COMPENSATED_SLICE // x.shape[1], 1) if compensated else _rows(x)
    step = -(-step // tile) * tile if tile else (step if scale is not None else len(x))
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = []
    for start in range(0, len(x), step):
        part = x[start : start + step]
        if scale is None:  # whoever gave one has looked at all values
            _check_finite(part, name)
        q = solve(part, rule, scale, module) if solve and compensated else quantize(part, rule, scale=scale)
        codes[start : start + step] = q.codes
        scales.append(q.scale)
    whole = scale if scale is not None else torch.cat(scales)
    return ScaledTensor(codes, whole, rule.spec, rule.granularity)


def amax_in_slices(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """The largest magnitude of several matrices, float32, scalar."""
    parts = []
    for x in tensors:
        for part in torch.split(x, _rows(x)):
            parts.append(_check_finite(part, name).to(tensors[0].device))
    return torch.stack(parts).max()


@cache
def _malloc_trim() -> Callable[[int], int]:
    """glibc's; elsewhere nothing."""
    found: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)
    return found


def _rows(x: torch.Tensor) -> int:
    return max(SLICES.get(x.device.type, SLICE) // max(x.shape[1], 1), 1)


def _check_finite(x: torch.Tensor, name: str) -> torch.Tensor:
    """The largest magnitude of x, float32."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    amax = x.abs().amax().float()
    if not bool(torch.isfinite(amax)):
        kind = "NaN" if bool(torch.isnan(amax)) else "Inf"
        raise CheckpointError(f"tensor {name}", got=kind, need="finite weights", fix="Fetch the checkpoint again.")
    return amax


@dataclass
class Streamer:
    """Makes the parameters of planned modules out of the tensors that arrive.

    held: weights that wait for their fused siblings, by module; with per-tensor scales all of them share one scale.
    solve: for rules that round with compensation.
    """

    plan: LoadPlan
    checkpoint: Checkpoint | None
    scales: Scales | None = None
    solve: Compensator | None = None
    held: Tensors = field(default_factory=dict)
    untrimmed: int = 0

    def linear(self, module: str, x: torch.Tensor) -> Tensors:
        """The weight of a linear arrived: its parameters, by full name; {} while siblings are missing."""
        plan = self.plan.modules[module]
        if plan.stored:
            assert self.checkpoint is not None
            q = read_scaled(self.checkpoint, plan.disk, self.plan.scheme)
            # Copies: the file stays mapped only as long as somebody looks at it.
            codes, scale = q.codes.to(x.device, copy=True), q.scale.to(x.device, copy=True)
            return self._parameters(module, plan, ScaledTensor(codes, scale, q.spec, q.granularity))
        group = self._common_scale_group(module)
        if len(group) == 1:
            return self._parameters(module, plan, self._quantize(module, self._exact(plan, x)))
        self.held[module] = self._exact(plan, x)
        if not all(sibling in self.held for sibling in group):
            return {}
        waiting = {sibling: self.held.pop(sibling) for sibling in group}
        amax = amax_in_slices(list(waiting.values()), self._name(module))
        scale = scale_of(amax, plan.rule.spec, plan.rule.scale_format)
        result: Tensors = {}
        for sibling in group:
            q = self._quantize(sibling, waiting.pop(sibling), scale.to(x.device))
            result |= self._parameters(sibling, self.plan.modules[sibling], replace(q, scale=q.scale.clone()))
        return result

    def experts(self, module: str, leaf: str, parts: list[list[torch.Tensor]]) -> Tensors:
        """All experts' matrices of one parameter: [[gate of each expert], [up of each]], or [[down of each]]."""
        plan = self.plan.modules[module]
        name, device = f"{module}.{leaf}", parts[0][0].device
        disk = list(self.plan.disk_modules(name).values())
        shards, experts, (rows, cols) = len(parts), len(parts[0]), parts[0][0].shape
        codes = torch.empty((experts, shards * rows, cols), dtype=torch.uint8, device=device)
        shape = (experts, shards, *plan.rule.granularity.scale_shape((rows, cols)))
        scales = torch.empty(shape, dtype=torch.float32, device=device)
        for expert in range(experts):
            matrices = [part[expert] for part in parts]
            common = None
            if not plan.stored and shards > 1 and isinstance(plan.rule.granularity, PerTensor):
                common = scale_of(amax_in_slices(matrices, name), plan.rule.spec, plan.rule.scale_format)
            for shard, matrix in enumerate(matrices):
                if plan.stored:
                    assert self.checkpoint is not None
                    q = read_scaled(self.checkpoint, disk[shard][expert], self.plan.scheme)
                else:
                    part = f"{module}.{expert}.{leaf}"
                    rule = self._rule_for(plan.rule, part)
                    q = quantize_in_slices(matrix, rule, name, common, solve=self.solve, module=part)
                codes[expert, shard * rows : (shard + 1) * rows] = q.codes
                scales[expert, shard] = q.scale
        self._count(codes.numel())
        return {name: FrozenParameter(codes), f"{name}_scale": FrozenParameter(scales)}

    def _rule_for(self, rule: Rule, part: str) -> Rule:
        """Of one expert: to nearest where too few tokens were routed to it."""
        if self.solve is not None and part in self.solve.moments:
            return rule
        return rule.rounded("nearest")

    def _quantize(self, module: str, x: torch.Tensor, scale: torch.Tensor | None = None) -> ScaledTensor:
        plan = self.plan.modules[module]
        key = plan.disk or module
        return quantize_in_slices(x, plan.rule, self._name(module), scale, solve=self.solve, module=key)

    def _parameters(self, module: str, plan: ModulePlan, q: ScaledTensor) -> Tensors:
        self._count(q.nbytes)
        result: Tensors = {
            f"{module}.weight": FrozenParameter(q.codes),
            f"{module}.weight_scale": FrozenParameter(q.scale.reshape(q.scale.shape or (1,))),
        }
        if plan.activation == "static":
            value = torch.tensor([self._input_scale(module, plan)], dtype=torch.float32, device=q.codes.device)
            result[f"{module}.input_scale"] = FrozenParameter(value)
        return result

    def _count(self, nbytes: int) -> None:
        self.untrimmed += nbytes
        if self.untrimmed >= TRIM_EVERY:
            self.untrimmed = 0
            _malloc_trim()(0)

    def _input_scale(self, module: str, plan: ModulePlan) -> float:
        if self.scales is not None:
            name = module if module in self.scales.modules else plan.disk
            self.scales.require([name])
            return self.scales.modules[name].input_scale
        stored = f"{plan.disk}.input_scale"
        if self.checkpoint is None or stored not in self.checkpoint:
            fix = "Give scales=, the scales.json of `octavo calibrate`, or use activation 'token'."
            raise CheckpointError(f"activation 'static': no input scale for {module}", fix=fix)
        return float(self.checkpoint.get(stored).float().max())

    def _exact(self, plan: ModulePlan, x: torch.Tensor) -> torch.Tensor:
        """The tensor as it is on disk: Transformers may have cast it, and rounding twice is not rounding once."""
        name = f"{plan.disk}.weight"
        if self.checkpoint is None or name not in self.checkpoint or self.checkpoint.dtype(name) == x.dtype:
            return x
        return self.checkpoint.get(name).to(x.device)

    def _common_scale_group(self, module: str) -> list[str]:
        plan = self.plan.modules[module]
        siblings = (fused_group(module) or ("", (module,)))[1]
        if not isinstance(plan.rule.granularity, PerTensor) or plan.rule.method != "absmax":
            return [module]
        group = [s for s in siblings if s in self.plan.modules and not self.plan.modules[s].stored]
        return [s for s in group if self.plan.modules[s].rule == plan.rule]

    def _name(self, module: str) -> str:
        return f"{self.plan.modules[module].disk or module}.weight"


def unfilled(model: nn.Module) -> list[str]:
    """FP8 modules whose weight never arrived."""
    from octavo.modules.experts import FrozenFloat8Experts
    from octavo.modules.frozen import FrozenFloat8Linear

    missing = []
    for name, module in model.named_modules():
        if isinstance(module, FrozenFloat8Linear | FrozenFloat8Experts):
            codes = [
                p for n, p in module.named_parameters(recurse=False) if n in ("weight", "gate_up_proj", "down_proj")
            ]
            if any(p.dtype != torch.uint8 or p.is_meta for p in codes):
                missing.append(name)
    return missing
