"""The KV cache in FP8, as an engine keeps it: keys (after rotary embedding) and values, rounded as they are written.

    writer = Float8KVWriter("tensor", scales={0: (0.03, 0.01)})
    model(tokens, past_key_values=writer.watch(cache))

Attention then reads what was rounded, of earlier tokens and of the token itself: engines read all of it from the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from octavo.base.errors import UnsupportedError
from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3
from octavo.ops.quantize import fake_quantize

Granularity = Literal["tensor", "token-head"]
TENSOR, TOKEN_HEAD = Rule(granularity=PerTensor()), Rule(granularity=PerRow())


@dataclass
class LayerCount:
    """What one layer's cache was given. values: how many; clipped: how many of them were beyond 448 scales."""

    values: int = 0
    clipped: int = 0


@dataclass
class Float8KVWriter:
    """Rounds keys and values to E4M3 and back.

    granularity: `tensor` takes one scale for a layer's keys and one for its values, from `scales` (layer, as caches
    count, -> k and v; 1.0 for a layer that is not in it); `token-head` finds one for each token and head when written.
    layers: those to round, None for all; the others keep 16 bit. latent: width of the keys of a model with latent
    attention (its kv_lora_rank), whose engines store exactly the latent vector and the rotary part.
    """

    granularity: Granularity = "tensor"
    scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    layers: Collection[int] | None = None
    latent: int | None = None
    counts: dict[int, LayerCount] = field(default_factory=dict)

    def rounds(self, layer: int) -> bool:
        """Whether this layer's cache is in FP8."""
        return self.layers is None or layer in self.layers

    def watch(self, cache: Any) -> Any:
        """Round in every `cache.update(keys, values, layer, ...)`, each [batch, heads, sequence, width]; returns it."""
        inner = cache.update

        def update(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            if self.rounds(layer):
                self._check(keys, layer)
                k_scale, v_scale = self.scales.get(layer, (1.0, 1.0))
                keys, values = self.round(keys, k_scale, layer), self.round(values, v_scale, layer)
            return inner(keys, values, layer, *args, **kwargs)

        cache.update = update
        return cache

    def round(self, x: torch.Tensor, scale: float, layer: int) -> torch.Tensor:
        """x [..., width] as the cache gives it back, in x's dtype. scale: of granularity `tensor`."""
        count = self.counts.setdefault(layer, LayerCount())
        count.values += x.numel()
        if self.granularity == "token-head":
            return fake_quantize(x, TOKEN_HEAD)
        count.clipped += int((x.abs() > E4M3.max * scale).sum())
        return fake_quantize(x, TENSOR, scale=torch.tensor(scale, dtype=torch.float32, device=x.device))

    def _check(self, keys: torch.Tensor, layer: int) -> None:
        if self.latent is not None and keys.shape[-1] != self.latent:
            raise UnsupportedError(
                f"FP8 KV cache: layer {layer} shows expanded keys, and engines store the latent vector",
                got=f"width {keys.shape[-1]}",
                need=f"{self.latent}",
                fix="Use a newer Transformers, which caches the latent vector of this model.",
            )
