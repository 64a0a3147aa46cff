"""Second moments of the inputs of linears, H = sum of w x x^T over tokens x, and the weights w of the tokens.

With w = 1, H measures the error of the layer's outputs. What matters is the error of the model: to second order its KL
divergence to itself is the outputs' error weighted by the Fisher information (used for rounding in arXiv 2505.07004).
Here w is the squared norm of the gradient, at that token and layer, of the negative log-likelihood of a token drawn
from the model's own distribution: an estimate of the Fisher trace, one number a token, to the power TEMPER.

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
# One drawn token makes a noisy square: tempered, it loses less by noise than it forgets (ADR 6).
TEMPER = 0.7
RUN = 256  # tokens of the vocabulary whose probabilities are summed before one is drawn


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


@contextmanager
def fast_arithmetic(model: nn.Module) -> Iterator[None]:
    """`fast_products`, and the model's float32 parameters are BF16 inside, again where the CPU has units for it.

    Half the time forward and backward. They are what they were afterwards. Tables that are added to what flows through
    the model, such as XGLM's positions, go with them; vectors, such as frequencies of rotary embedding, do not.
    """
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.dim() > 1)]
    before = [(p, p.data) for p in tensors if p.device.type == "cpu" and p.dtype == torch.float32]
    with fast_products():
        try:
            for p, data in before if torch.cpu._is_amx_tile_supported() else []:
                p.data = data.bfloat16()
            yield
        finally:
            for p, data in before:
                p.data = data


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


class MomentSums:
    """Adds up H for groups of linears, sample by sample.

    tokens: key -> how many came. matrices, once finished: key -> H, float32 [K, K], its off-diagonal elements shrunk by
    `noise[key]`.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        self.matrices: dict[str, torch.Tensor] = {}
        self.noise: dict[str, float] = {}
        self.tokens = dict.fromkeys(groups, 0)
        self._halves: dict[str, list[_Half]] = {}

    @torch.no_grad()
    def add(self, key: str, x: torch.Tensor, weights: torch.Tensor | float = 1.0) -> None:
        """x [..., K]: the inputs of one sample. weights: float32 [tokens], on any device, or one number for all."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.tokens[key] += len(x)
        if isinstance(weights, torch.Tensor):
            x, total, each = x * weights.sqrt().to(x.device)[:, None], float(weights.sum()), 1.0
        else:
            total, each = weights * len(x), weights
        halves = self._halves.setdefault(key, [])
        if len(halves) < 2:
            halves.append(_Half((x.mT @ x).mul_(each), [total]))
            return
        half = halves[0] if len(halves[0].totals) <= len(halves[1].totals) else halves[1]
        half.matrix.addmm_(x.mT, x, alpha=each)
        half.totals.append(total)

    def finish(self) -> None:
        """Weights have a mean of 1 from here on, so that the matrices of different groups compare."""
        for key in list(self._halves):
            halves = self._halves.pop(key)
            total = sum(sum(half.totals) for half in halves)
            self.matrices[key], self.noise[key] = _shrunk(*halves)
            if 0 < total != self.tokens[key]:
                self.matrices[key].mul_(self.tokens[key] / total)


class Inputs(_Watch):
    """use(key, inputs [..., K]) for each group while samples run through the model."""

    def __init__(
        self, model: nn.Module, groups: Mapping[str, list[str]], use: Callable[[str, torch.Tensor], None]
    ) -> None:
        super().__init__(model, groups)
        self._use = use

    def __enter__(self) -> Self:
        for key, names in self.groups.items():
            if names[0] in self.linears:
                self._hooks.append(self.linears[names[0]].register_forward_pre_hook(self._hook(key)))
        return super().__enter__()

    def expert(
        self, name: str, x: torch.Tensor, result: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        if name in self.groups:
            self._use(name, x)

    def _hook(self, key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda linear, inputs: self._use(key, inputs[0])


class MomentObserver(Inputs, MomentSums):
    """Adds up H while samples run through the model.

    groups: see above; of linears that share their input the first is watched. weights: key -> float32 [tokens], in
    the order in which tokens will come, or None for all ones. The sums are finished when the block ends.
    """

    def __init__(
        self, model: nn.Module, groups: Mapping[str, list[str]], weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        Inputs.__init__(self, model, groups, self._weighted)
        MomentSums.__init__(self, groups)
        self._weights = weights

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.finish()

    def _weighted(self, key: str, x: torch.Tensor) -> None:
        first, count = self.tokens[key], x.shape[:-1].numel()
        self.add(key, x, 1.0 if self._weights is None else self._weights[key][first : first + count])


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


@dataclass
class _Call:
    """x: the inputs of a linear, [..., K]. norm: squared norms of the gradients at its outputs, float32 [...]."""

    x: torch.Tensor
    norm: torch.Tensor | None = None


class TokenWeights(_Watch):
    """Weighs tokens by squared gradient norms at the outputs of linears, summed over the linears of a group, tempered.

    with TokenWeights(model, groups, use) as watch: run samples forward and backward, then `watch.flush()`, which calls
    use(key, inputs [tokens, K], weights float32 [tokens]) for each sample and each group that it reached. Weights are
    in units of the group's own, and no token counts for much more than MOST_WEIGHT times the mean of those so far.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[str, list[str]],
        use: Callable[[str, torch.Tensor, torch.Tensor], object],
    ) -> None:
        super().__init__(model, groups)
        self._use = use
        self._calls: dict[str, list[_Call]] = {}
        self._so_far = dict.fromkeys(groups, (0.0, 0))  # sum of the weights, tokens

    def __enter__(self) -> Self:
        for name, linear in self.linears.items():
            self._hooks.append(linear.register_forward_hook(self._hook(name)))
        return super().__enter__()

    def expert(
        self, name: str, x: torch.Tensor, result: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        if name in self.groups:
            self._watch(name, x, result, pick)

    def _hook(self, name: str) -> Callable[..., None]:
        return lambda linear, inputs, output: self._watch(name, inputs[0], output, lambda gradient: gradient)

    def _watch(
        self, name: str, x: torch.Tensor, result: torch.Tensor, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        call = _Call(x.detach())
        self._calls.setdefault(name, []).append(call)

        def arrived(gradient: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(pick(gradient.detach()), dim=-1, dtype=torch.float32)
            call.norm = norm.square()

        result.register_hook(arrived)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """The samples are done. CheckpointError for gradients that hold NaN or Inf."""
        for key, names in self.groups.items():
            siblings = [calls for name in names if (calls := self._calls.pop(name, None))]
            for together in zip(*siblings, strict=True):
                norms = [call.norm for call in together if call.norm is not None]
                if not norms:
                    continue
                x, norm = together[0].x, torch.stack(norms).sum(0).pow(TEMPER).cpu()
                whole = [(x, norm)] if x.dim() < 3 else zip(x.flatten(1, -2), norm.flatten(1), strict=True)
                for sample, its in whole:
                    self._use(key, sample, self._capped(key, its))

    def mean(self, key: str) -> float:
        """Of the weights so far; 1 where there are none."""
        total, tokens = self._so_far[key]
        return total / tokens if tokens else 1.0

    def _capped(self, key: str, weight: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError(f"the gradient at {key} holds NaN or Inf", fix="Calibrate in float32.")
        total, tokens = self._so_far[key]
        tokens += len(weight)
        for _ in range(CAP_STEPS):  # the mean that caps is the capped one: a loud token must not raise its own cap
            most = MOST_WEIGHT * (total + float(weight.sum())) / tokens
            if float(weight.max()) <= most:
                break
            weight = weight.clamp(max=most)
        self._so_far[key] = total + float(weight.sum()), tokens
        return weight


def fisher_backward(logits: torch.Tensor, generator: torch.Generator) -> None:
    """logits [T, V]: draw a token from each distribution, and backpropagate its negative log-likelihood.

    Drawing from the model, not taking the text's next token, makes the squared gradient estimate the Fisher trace.
    """
    p = logits.detach().softmax(-1)
    drawn = _draw(p, generator)
    gradient = p.scatter_add_(-1, drawn, torch.full_like(drawn, -1, dtype=p.dtype))  # of -log p[drawn]
    logits.backward(gradient)  # type: ignore[no-untyped-call]


def _draw(p: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """int64 [T, 1]: a token from each distribution p [T, V]. First a run of RUN tokens, then one of it: a running sum
    of the whole vocabulary would take longer than everything else here."""
    count, vocabulary = p.shape
    runs = nn.functional.pad(p, (0, -vocabulary % RUN)).view(count, -1, RUN)
    totals = runs.sum(-1).float().cumsum(-1)
    # Uniform numbers of the CPU, so that every device draws alike; times the sum, which is about 1.
    uniform = torch.rand((count, 1), generator=generator).to(p.device) * totals[:, -1:]
    run = torch.searchsorted(totals, uniform, right=True).clamp(max=runs.shape[1] - 1)
    before = nn.functional.pad(totals, (1, 0)).gather(1, run)
    inner = runs.gather(1, run[:, :, None].expand(-1, -1, RUN))[:, 0].float().cumsum(-1)
    rest = (uniform - before) / (totals.gather(1, run) - before) * inner[:, -1:]
    token = torch.searchsorted(inner, rest, right=True).clamp(max=RUN - 1)
    return (run * RUN + token).clamp(max=vocabulary - 1)
