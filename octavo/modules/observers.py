"""Observers: what flows into the linears and the KV cache of a model, seen one sample at a time.

    kv = CacheObserver()
    with InputObserver(model, names) as inputs:
        model(tokens, past_key_values=kv.watch(cache))

Every statistic streams: what is kept does not grow with the number of samples, except the few sampled rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from octavo.base.errors import CheckpointError, ShapeError

# The histogram of magnitudes: 32 bins for each power of two from 2**-40 to 2**24, taken from the bits of the float32.
BINS_PER_OCTAVE = 32
FIRST_EXPONENT, LAST_EXPONENT = -40, 24
BINS = BINS_PER_OCTAVE * (LAST_EXPONENT - FIRST_EXPONENT)
PERCENTILES = (50.0, 99.0, 99.9, 99.99)

Seen = Callable[[str, torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], None]

_SHIFT = 23 - int(math.log2(BINS_PER_OCTAVE))
_ALL_BINS = (0xFF + 1) * BINS_PER_OCTAVE - 1  # exponent and kept mantissa bits, without the sign
_FIRST_BIN = (127 + FIRST_EXPONENT) * BINS_PER_OCTAVE


def histogram(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Magnitudes of finite x (any shape) -> counts, int64 [BINS]. Smaller ones count in the first bin, larger last.

    weights: of x's shape; sums of them then, float64 [BINS].
    """
    bits = x.detach().float().contiguous().view(torch.int32).flatten()
    given = None if weights is None else weights.detach().flatten()
    if bits.device.type == "cpu":  # NumPy counts ten times faster than torch on a busy CPU
        index = (bits.numpy().view(np.uint32) >> _SHIFT) & _ALL_BINS
        wide = torch.from_numpy(np.bincount(index, None if given is None else given.numpy(), minlength=_ALL_BINS + 1))
    else:
        given = None if given is None else given.double()
        wide = torch.bincount((bits >> _SHIFT) & _ALL_BINS, given, minlength=_ALL_BINS + 1)
    last = _FIRST_BIN + BINS
    counts = wide[_FIRST_BIN:last].clone()
    counts[0] += wide[:_FIRST_BIN].sum()
    counts[-1] += wide[last:].sum()
    return counts


def bin_edge(index: int) -> float:
    """The upper edge of a histogram bin."""
    octave, step = divmod(index + 1, BINS_PER_OCTAVE)
    return math.ldexp(1 + step / BINS_PER_OCTAVE, octave + FIRST_EXPONENT)


@dataclass
class InputStats:
    """What a linear of K inputs has been given.

    tokens: rows seen. channel_amax: float32 [K], the largest magnitude of each input. counts: see `histogram`.
    energy: float64 [BINS], squares of the magnitudes of a bin as shares of their token's energy, summed over tokens.
    rows: sampled inputs, each [r, K], for measuring the error of outputs.
    """

    channels: int
    tokens: int = 0
    channel_amax: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    energy: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    rows: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, x: torch.Tensor, rows: int) -> InputStats:
        """The statistics of one batch of inputs, [tokens, K], keeping `rows` rows spread evenly over it."""
        count = min(rows, len(x))
        picks = [(2 * i + 1) * len(x) // (2 * count) for i in range(count)]
        kept = [x[picks].clone()] if picks else []
        amax = torch.linalg.vector_norm(x, math.inf, dim=0).float()
        return cls(x.shape[1], len(x), amax, histogram(x), histogram(x, _shares(x)), kept)

    def merge(self, other: InputStats) -> None:
        """Add what another observed."""
        first = not self.tokens
        self.tokens += other.tokens
        self.channel_amax = other.channel_amax if first else torch.maximum(self.channel_amax, other.channel_amax)
        self.counts = other.counts if first else self.counts + other.counts
        self.energy = other.energy if first else self.energy + other.energy
        self.rows.extend(other.rows)

    @property
    def amax(self) -> float | None:
        """The largest magnitude, exact; None if no token came by."""
        return float(self.channel_amax.max()) if self.tokens else None

    def percentile(self, percent: float) -> float | None:
        """The magnitude that `percent` of the values do not exceed: never below the exact one, at most 1/32 above it.

        Below 2**-40 the accuracy is 2**-40. None if no token came by.
        """
        if not self.tokens or self.amax is None:
            return None
        below = self.counts.cumsum(0)
        need = math.ceil(int(below[-1]) * percent / 100)
        index = int(torch.searchsorted(below, max(need, 1)))
        return min(bin_edge(index), self.amax)

    def sample(self) -> torch.Tensor:
        """The sampled rows together, [r, K]; r = 0 if no token came by."""
        return torch.cat(self.rows) if self.rows else torch.zeros(0, self.channels)


class InputObserver:
    """Watches the inputs of linears and of stacked experts; statistics by name in `stats`.

    A linear is watched under its module name; expert e of a 3-D parameter `m.experts.w` under `m.experts.e.w`.
    Experts that no token reaches keep `tokens == 0`: nothing is made up for them.

    names: the modules and stacked parameters to watch, as in `model.named_modules()` and `named_parameters()`.
    rows: rows sampled from each call. mask: bool [batch, sequence] of the running sample, False for padding; None
    when there is no padding. transposed: stacked parameters seen used as x @ W[e], W[e] being [K, N], not [N, K].
    """

    def __init__(self, model: nn.Module, names: Iterable[str], rows: int = 2) -> None:
        self.rows = rows
        self.mask: torch.Tensor | None = None
        self.stats: dict[str, InputStats] = {}
        self.transposed: set[str] = set()
        self._hooks: list[Any] = []
        self._last: tuple[torch.Tensor, int, InputStats] | None = None
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        self._linears: dict[str, nn.Linear] = {}
        self._stacks: dict[str, dict[str, nn.Parameter]] = {}
        for name in names:
            if name in parameters:
                owner, _, leaf = name.rpartition(".")
                self._stacks.setdefault(owner, {})[leaf] = parameters[name]
                for expert in range(len(parameters[name])):
                    self.stats[f"{owner}.{expert}.{leaf}"] = InputStats(0)
                continue
            linear = modules.get(name)
            if not isinstance(linear, nn.Linear):
                raise ShapeError(f"'{name}' cannot be watched", got=type(linear).__name__, need="an nn.Linear")
            self._linears[name] = linear
            self.stats[name] = InputStats(linear.in_features)
        self._owners = {owner: modules[owner] for owner in self._stacks}

    def __enter__(self) -> Self:
        for name, linear in self._linears.items():
            self._hooks.append(linear.register_forward_pre_hook(self._hook(name)))
        for owner, module in self._owners.items():
            products = ExpertProducts(owner, self._stacks[owner], self._seen, self.transposed)
            self._hooks += products.watch(module)
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._last = None

    def stack(self, name: str) -> nn.Parameter | None:
        """The watched stacked parameter of this name, or None."""
        owner, _, leaf = name.rpartition(".")
        return self._stacks.get(owner, {}).get(leaf)

    def observe(self, name: str, x: torch.Tensor) -> None:
        """Add inputs x [..., K] of the module `name`. CheckpointError names the module if they hold NaN or Inf."""
        stats = self.stats[name]
        last = self._last
        # Siblings such as q, k and v are given the very same tensor: it is summed up once.
        if last is None or last[0] is not x or last[1] != x._version:
            last = self._last = (x, x._version, self._summary(name, x))
        stats.channels = x.shape[-1]
        stats.merge(last[2])

    def _summary(self, name: str, x: torch.Tensor) -> InputStats:
        flat = x.detach().reshape(-1, x.shape[-1])
        if self.mask is not None:
            if tuple(x.shape[:-1]) != tuple(self.mask.shape):
                got = f"inputs {list(x.shape)} and a mask {list(self.mask.shape)}"
                raise ShapeError(f"{name}: padding cannot be told from tokens", got=got, fix="Use a batch size of 1.")
            flat = flat[self.mask.reshape(-1).to(flat.device)]
        if not len(flat):
            return InputStats(x.shape[-1])
        summary = InputStats.of(flat, self.rows)
        if not bool(torch.isfinite(summary.channel_amax).all()):
            raise _not_finite(f"the inputs of {name}", bool(flat.isnan().any()))
        return summary

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self.observe(name, args[0])

        return hook

    def _seen(self, name: str, x: torch.Tensor, *_: object) -> None:
        self.observe(name, x)


class CacheObserver:
    """Watches what a KV cache is given: keys after rotary embedding, one entry per KV head, as the cache holds them.

    ranges: layer -> (k, v), the largest magnitudes of each KV head, float32 [heads]. mask: as in InputObserver.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.widths: dict[int, int] = {}
        self.mask: torch.Tensor | None = None

    def watch(self, cache: Any) -> Any:
        """Observe every `cache.update(keys, values, layer, ...)`, [batch, heads, sequence, head_dim]; returns it."""
        inner = cache.update

        def update(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            self.observe(layer, keys, values)
            return inner(keys, values, layer, *args, **kwargs)

        cache.update = update
        return cache

    def observe(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add keys and values of a layer. CheckpointError names the layer if they hold NaN or Inf."""
        amax = (self._head_amax(layer, "keys", keys), self._head_amax(layer, "values", values))
        old = self.ranges.get(layer)
        self.ranges[layer] = (torch.maximum(old[0], amax[0]), torch.maximum(old[1], amax[1])) if old else amax
        self.widths[layer] = keys.shape[-1]

    def _head_amax(self, layer: int, what: str, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().transpose(1, 2)
        x = x[self.mask.to(x.device)] if self.mask is not None else x.flatten(0, 1)
        if not len(x):
            return torch.zeros(x.shape[1])
        amax = torch.linalg.vector_norm(x.float(), math.inf, dim=(0, 2))
        if not bool(torch.isfinite(amax).all()):
            raise _not_finite(f"the {what} of layer {layer}", bool(x.isnan().any()))
        result: torch.Tensor = amax.cpu()
        return result


class ExpertProducts(TorchFunctionMode):
    """Sees the matrix products of a module whose experts are slices of 3-D parameters, and says which expert it was.

    seen(name, x, result, pick): a product of expert `owner.E.leaf`, x [rows, K] its inputs, result what the product
    returned, and pick what takes these rows out of a tensor shaped like result. transposed: gets the names of stacks
    used as x @ W[e].
    """

    _LINEAR, _MATMUL = frozenset({"linear"}), frozenset({"matmul", "mm", "bmm", "__matmul__"})

    def __init__(
        self, owner: str, stacks: dict[str, nn.Parameter], seen: Seen, transposed: set[str] | None = None
    ) -> None:
        super().__init__()
        self.owner, self.stacks, self.seen = owner, stacks, seen
        self.transposed = transposed if transposed is not None else set()

    def watch(self, module: nn.Module) -> list[Any]:
        """Look on while `module` runs; returns the handles of the hooks."""
        start = module.register_forward_pre_hook(lambda *_: self._enter())
        return [start, module.register_forward_hook(lambda *_: self._leave(), always_call=True)]

    def _enter(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = getattr(func, "__name__", "")
        if kind in self._LINEAR | self._MATMUL and len(args) > 1:
            self._product(args[0], args[1], result, -2 if kind in self._MATMUL else -1)
        return result

    def _product(self, x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, inner: int) -> None:
        """x times an expert's weight [.., ..], or all experts' inputs times the stack. inner: dimension of K in it."""
        for leaf, stack in self.stacks.items():
            if weight.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr():
                continue
            if weight.stride(inner) == stack.stride(1) != stack.stride(2):
                self.transposed.add(f"{self.owner}.{leaf}")
            if weight.ndim == 2:
                expert = (weight.storage_offset() - stack.storage_offset()) // stack.stride(0)
                self.seen(f"{self.owner}.{expert}.{leaf}", x, result, lambda whole: whole)
                return
            for expert, rows in enumerate(x):
                # Models that multiply every expert with every token mask the tokens of others with zeros.
                given = rows.abs().amax(-1) > 0
                if bool(given.any()):
                    pick = partial(_rows_of, expert, given)
                    self.seen(f"{self.owner}.{expert}.{leaf}", rows[given], result, pick)
            return


def _rows_of(expert: int, given: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return whole[expert][given]


def _shares(x: torch.Tensor) -> torch.Tensor:
    """Squares of x [tokens, K] as shares of their token's energy; magnitudes beyond 2**24 must not overflow."""
    x = x.detach().float()
    scaled = x / torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    square: torch.Tensor = scaled.square()
    return square / square.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _not_finite(what: str, nan: bool) -> CheckpointError:
    fix = "Check the weights of the layers before it (octavo verify), or compute in float32 or bfloat16."
    return CheckpointError(what, got="NaN" if nan else "Inf", need="finite activations", fix=fix)
