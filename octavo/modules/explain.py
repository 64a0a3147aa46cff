"""Which kernel multiplies each FP8 layer of a model, and why: `octavo.why` for every layer, like ones together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from octavo.base.hardware import HardwareCaps, caps_named, caps_of
from octavo.formats.rule import Rule
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.backends import Choice, Problem, choose


@dataclass(frozen=True)
class LayerKernels:
    """Layers of one shape and scheme. names: of all. choices: for each number of tokens, its size as `m`."""

    names: tuple[str, ...]
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        leaves = sorted({name.rpartition(".")[2] for name in self.names})
        lines = [f"{len(self.names)} x {', '.join(leaves)}"]
        for choice in self.choices:
            first, *reasons = str(choice).splitlines()
            lines += [f"  {first}", *(f"  {reason}" for reason in reasons)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; print it. sixteen_bit: linears that are not in FP8, which torch multiplies.

    training: how a step of LoRA runs and why, for models of `octavo.load`.
    """

    layers: tuple[LayerKernels, ...]
    sixteen_bit: tuple[str, ...]
    training: tuple[str, ...] = ()

    def __str__(self) -> str:
        rest = (f"{len(self.sixteen_bit)} linears in 16 bit: torch",) if self.sixteen_bit else ()
        return "\n".join([*(str(layer) for layer in self.layers), *rest, *self.training])


@runtime_checkable
class Explains(Protocol):
    """A hook that knows what it makes of the module it is on."""

    def explain(self, module: nn.Module, gpu: HardwareCaps | None) -> str: ...


def explain(model: nn.Module, tokens: Sequence[int] = (1, 64, 4096), gpu: str | None = None) -> Explanation:
    """For every FP8 linear and expert of a model: which kernel takes so many tokens, and why no other before it.

    tokens: rows of the input, one answer each. gpu: by name or compute capability, one that need not be here; default:
    where the layer is. Inputs have the layer's compute dtype; experts count once a layer, with the tokens each gets.
    """
    groups: dict[Problem, list[str]] = {}
    devices: dict[Problem, torch.device] = {}
    rest = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            rest.append(name)
        for label, problem, device in _problems(name, module):
            groups.setdefault(problem, []).append(label)
            devices[problem] = device
    found = []
    for problem, names in groups.items():
        caps = caps_named(gpu) if gpu else caps_of(devices[problem])
        found.append(LayerKernels(tuple(names), tuple(_choice(problem, m, caps) for m in tokens)))
    hooks: Iterator[tuple[nn.Module, object]] = (
        (module, hook) for module in model.modules() for hook in module._forward_pre_hooks.values()
    )
    training = tuple(
        hook.explain(module, caps_named(gpu) if gpu else None) for module, hook in hooks if isinstance(hook, Explains)
    )
    return Explanation(tuple(found), tuple(rest), training)


def _problems(name: str, module: nn.Module) -> list[tuple[str, Problem, torch.device]]:
    if isinstance(module, FrozenFloat8Linear):
        weight, rule, dtype = module.weight, module.rule, module.compute_dtype
        return [(name, _problem(rule, module.activation, dtype, *weight.shape), weight.device)]
    if isinstance(module, FrozenFloat8Experts):
        shapes = {"gate_up": (module.intermediate, module.hidden), "down": (module.hidden, module.intermediate)}
        device = cast(torch.Tensor, module.down_proj).device
        return [
            (f"{name}.{part}", _problem(module.rule, module.activation, torch.bfloat16, *shape), device)
            for part, shape in shapes.items()
        ]
    return []


def _problem(rule: Rule, activation: str, dtype: torch.dtype, n: int, k: int) -> Problem:
    return Problem("linear", "", dtype, rule.spec.name, rule.granularity.tile, activation, 1, n, k)


def _choice(problem: Problem, m: int, caps: HardwareCaps) -> Choice:
    return choose(replace(problem, m=m, device="cuda" if caps.is_cuda else "cpu"), caps)
