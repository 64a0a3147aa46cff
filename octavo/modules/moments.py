"""Second moments of the inputs of linears, H = sum of w x x^T over tokens x, and the weights w of the tokens.

With w = 1, H measures the error of the layer's outputs. What matters is the error of the model: to second order its KL
divergence to itself is the outputs' error weighted by the Fisher information (used for rounding in arXiv 2505.07004).
Here w is the squared norm of the gradient, at that token and layer, of the negative log-likelihood of a token drawn
from the model's own distribution: an estimate of the Fisher trace, one number a token.

H is a sum over a few thousand tokens, and products of different inputs in it are partly chance, which rounding would
fit. How much shows in two halves of the samples: the off-diagonal elements are shrunk by that share (a linear shrinkage
towards the diagonal, as in Ledoit and Wolf 2004, with the noise taken from the halves instead of a model of it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import nn

from octavo.base.errors import CheckpointError
from octavo.formats.architectures import fused_group
from octavo.modules.observers import ExpertProducts

# A few tokens can carry most of the gradient; past this many times the mean they would drown the others.
MOST_WEIGHT = 20.0
CAP_STEPS = 32


@contextmanager
def fast_products() -> Iterator[None]:
    """Float32 products through BF16 inside this block, where the CPU has matrix units for BF16 (AMX).

    Four times as fast; sums stay float32, and 3 digits of each token are plenty for sums over thousands of them.
    """
    backend: Any = cast(Any, torch.backends.mkldnn).matmul
    before = backend.fp32_precision
    if torch.cpu._is_amx_tile_supported():
        backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before


def input_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Linears that are given the same input, under one key: q/k/v, gate/up, and each other one alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        fused = fused_group(name)
        groups.setdefault(fused[0] if fused else name, []).append(name)
    return groups


class _Watch(ABC):
    """Hooks on the linears of groups, and on the products of experts, which are groups of their own.

    groups: key -> names of linears that share their input, or [key] alone for expert E of a stack: `owner.E.leaf`.
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, list[str]]) -> None:
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        self.groups = groups
        self.linears = {name: modules[name] for names in groups.values() for name in names if name in modules}
        self.stacks: dict[str, dict[str, nn.Parameter]] = {}
        for key in groups:
            if key not in modules and groups[key] == [key]:
                owner, _expert, leaf = key.rsplit(".", 2)
                self.stacks.setdefault(owner, {})[leaf] = parameters[f"{owner}.{leaf}"]
        self.owners = {owner: modules[owner] for owner in self.stacks}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for owner, module in self.owners.items():
            self._hooks += ExpertProducts(owner, self.stacks[owner], self.expert).watch(module)
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @abstractmethod
    def expert(
        self, name: str, x: torch.Tensor, result: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """A product of an expert, see ExpertProducts."""


class MomentObserver(_Watch):
    """Adds up H for groups of linears while samples run through the model.

    groups: see above; of linears that share their input the first is watched. weights: key -> float32 [tokens], in
    the order in which tokens will come, or None for all ones. tokens: key -> how many came. matrices, once the block
    has ended: key -> H, float32 [K, K], its off-diagonal elements shrunk by `noise[key]`.
    """

    def __init__(
        self, model: nn.Module, groups: Mapping[str, list[str]], weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        super().__init__(model, groups)
        self.matrices: dict[str, torch.Tensor] = {}
        self.noise: dict[str, float] = {}
        self._halves: dict[str, list[_Half]] = {}
        self.tokens = dict.fromkeys(groups, 0)
        self._weights = weights

    def __enter__(self) -> Self:
        for key, names in self.groups.items():
            if names[0] in self.linears:
                self._hooks.append(self.linears[names[0]].register_forward_pre_hook(self._hook(key)))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for key in list(self._halves):
            self.matrices[key], self.noise[key] = _shrunk(*self._halves.pop(key))

    def expert(
        self, name: str, x: torch.Tensor, result: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        if name in self.groups:
            self._add(name, x)

    def _hook(self, key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda linear, inputs: self._add(key, inputs[0])

    @torch.no_grad()
    def _add(self, key: str, x: torch.Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        first = self.tokens[key]
        self.tokens[key] += len(x)
        total = float(len(x))
        if self._weights is not None:
            weights = self._weights[key][first : first + len(x)]
            x, total = x * weights.sqrt().to(x.device)[:, None], float(weights.sum())
        halves = self._halves.setdefault(key, [])
        if len(halves) < 2:
            halves.append(_Half(x.mT @ x, [total]))
            return
        half = halves[0] if len(halves[0].totals) <= len(halves[1].totals) else halves[1]
        half.matrix.addmm_(x.mT, x)
        half.totals.append(total)


@dataclass
class _Half:
    """Every other sample: matrix, the sum of w x x^T. totals: of w, by sample."""

    matrix: torch.Tensor
    totals: list[float]


def _shrunk(one: _Half, other: _Half | None = None) -> tuple[torch.Tensor, float]:
    """The sum of both, float32 [K, K], its off-diagonal elements shrunk; and by which share, 0 for one sample alone.

    Of correlations, so that loud inputs do not decide for all. With n1, n2 the weights of the halves, the squared
    difference of their means times n1 n2 / (n1 + n2)^2 is the noise that the mean of all has.
    """
    if other is None:
        return one.matrix, 0.0
    n1, n2 = sum(one.totals), sum(other.totals)
    size = (one.matrix.diagonal() + other.matrix.diagonal()).rsqrt()
    size = torch.where(torch.isfinite(size), size, torch.zeros_like(size))
    if not n1 or not n2:
        return one.matrix.add_(other.matrix), 0.0
    difference = (one.matrix / n1).sub_(other.matrix, alpha=1 / n2)
    total = one.matrix.add_(other.matrix)
    noise = n1 * n2 * _off_diagonal(difference, size)  # times (n1 + n2)^-2, which `total` has too, not being a mean
    del difference
    signal = _off_diagonal(total, size)
    share = min(noise / signal, 1.0) if signal > 0 else 0.0
    if share > 0:
        diagonal = total.diagonal().clone()
        total.mul_(1 - share).diagonal().copy_(diagonal)
    return total, share


def _off_diagonal(matrix: torch.Tensor, size: torch.Tensor) -> float:
    """Sum of squares of off-diagonal elements of size_i matrix_ij size_j."""
    scaled = (matrix * size).mul_(size[:, None])
    return float(scaled.square().sum() - scaled.diagonal().square().sum())


class TokenWeights(_Watch):
    """Squared gradient norms per token at the outputs of linears, summed over the linears of a group.

    with TokenWeights(model, groups) as weights: run backward passes; then `weights.finish()`.
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, list[str]]) -> None:
        super().__init__(model, groups)
        self._norms: dict[str, list[torch.Tensor]] = {name: [] for names in groups.values() for name in names}

    def __enter__(self) -> Self:
        for name, linear in self.linears.items():
            self._hooks.append(linear.register_forward_hook(self._hook(name)))
        return super().__enter__()

    def expert(
        self, name: str, x: torch.Tensor, result: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        if name in self.groups:
            result.register_hook(lambda gradient: self._add(name, pick(gradient)))  # type: ignore[no-untyped-call]

    def _hook(self, name: str) -> Callable[..., None]:
        def forward(linear: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: self._add(name, gradient))  # type: ignore[no-untyped-call]

        return forward

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        self._norms[name].append(gradient.detach().float().square().sum(-1).reshape(-1).cpu())

    def finish(self) -> dict[str, torch.Tensor]:
        """key -> float32 [tokens], mean 1; no token counts much more than MOST_WEIGHT times the mean.

        Experts that no token reached have no entry.
        """
        result = {}
        for key, names in self.groups.items():
            if not self._norms[names[0]]:
                continue
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
    cumulative = log_p.detach().exp().cumsum(-1)
    # Uniform numbers of the CPU, so that every device draws alike; times the sum, which float32 makes about 1.
    uniform = torch.rand((len(logits), 1), generator=generator).to(logits.device) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, uniform, right=True).clamp(max=logits.shape[-1] - 1)
    (-log_p.gather(-1, drawn)).sum().backward()  # type: ignore[no-untyped-call]
