"""Second moments of the inputs of linears, H = sum of w x x^T over tokens x, and the weights w of the tokens.

With w = 1, H measures the error of the layer's outputs. What matters is the error of the model: to second order its KL
divergence to itself is the outputs' error weighted by the Fisher information (used for rounding in arXiv 2505.07004).
Here w is the squared norm of the gradient, at that token and layer, of the negative log-likelihood of a token drawn
from the model's own distribution: an estimate of the Fisher trace, one number a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn

from octavo.base.errors import CheckpointError
from octavo.formats.architectures import fused_group

# A few tokens can carry most of the gradient; past this many times the mean they would drown the others.
MOST_WEIGHT = 20.0
CAP_STEPS = 32


def input_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Linears that are given the same input, under one key: q/k/v, gate/up, and each other one alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        fused = fused_group(name)
        groups.setdefault(fused[0] if fused else name, []).append(name)
    return groups


class MomentObserver:
    """Adds up H for groups of linears while samples run through the model.

    groups: key -> names of linears that share their input; the first is watched. weights: key -> float32 [tokens], in
    the order in which tokens will come, or None for all ones.
    """

    def __init__(
        self, model: nn.Module, groups: Mapping[str, list[str]], weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.matrices: dict[str, torch.Tensor] = {}
        self._weights, self._seen = weights, dict.fromkeys(groups, 0)
        self._watched = {key: model.get_submodule(names[0]) for key, names in groups.items()}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for key, linear in self._watched.items():
            self._hooks.append(linear.register_forward_pre_hook(self._hook(key)))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        @torch.no_grad()
        def add(linear: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()
            if self._weights is not None:
                first = self._seen[key]
                x = x * self._weights[key][first : first + len(x)].sqrt().to(x.device)[:, None]
            self._seen[key] += len(x)
            if key in self.matrices:
                self.matrices[key].addmm_(x.mT, x)
            else:
                self.matrices[key] = x.mT @ x

        return add


class TokenWeights:
    """Squared gradient norms per token at the outputs of linears, summed over the linears of a group.

    with TokenWeights(model, groups) as weights: run backward passes; then `weights.finish()`.
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, list[str]]) -> None:
        self._groups = groups
        self._linears = {name: model.get_submodule(name) for names in groups.values() for name in names}
        self._norms: dict[str, list[torch.Tensor]] = {name: [] for name in self._linears}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for name, linear in self._linears.items():
            self._hooks.append(linear.register_forward_hook(self._hook(self._norms[name])))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @staticmethod
    def _hook(norms: list[torch.Tensor]) -> Callable[..., None]:
        def backward(gradient: torch.Tensor) -> None:
            norms.append(gradient.detach().float().square().sum(-1).reshape(-1).cpu())

        def forward(linear: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            output.register_hook(backward)  # type: ignore[no-untyped-call]

        return forward

    def finish(self) -> dict[str, torch.Tensor]:
        """key -> float32 [tokens], mean 1; no token counts much more than MOST_WEIGHT times the mean."""
        result = {}
        for key, names in self._groups.items():
            weight = torch.stack([torch.cat(self._norms[name]) for name in names]).sum(0)
            if not bool(torch.isfinite(weight).all()):
                raise CheckpointError(f"the gradient at {key} holds NaN or Inf", fix="Calibrate in float32.")
            for _ in range(CAP_STEPS):  # the mean that caps is the capped one: a loud token must not raise its own cap
                weight = weight.clamp(max=MOST_WEIGHT * float(weight.mean()))
            mean = weight.mean()
            result[key] = weight / mean if float(mean) > 0 else torch.ones_like(weight)
        return result


def fisher_backward(logits: torch.Tensor, generator: torch.Generator) -> None:
    """logits [T, V] of one sample: draw a token from each distribution, and backpropagate its negative log-likelihood.

    Drawing from the model, not taking the text's next token, makes the squared gradient estimate the Fisher trace.
    """
    log_p = logits.float().log_softmax(-1)
    drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(logits.device)
    (-log_p.gather(-1, drawn)).sum().backward()  # type: ignore[no-untyped-call]
