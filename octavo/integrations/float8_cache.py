"""Float8Cache: Transformers' KV cache in FP8, for `generate` and for any forward, and the attention that reads it.

What a layer gets back from the cache are tensors that hold codes: the attention named `octavo` reads those, anything
else that touches them finds them decoded. So every model and every attention works, and with `octavo` on a GPU the
16-bit keys and values are never made for a new token, and never all at once for a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from octavo.base.errors import ConfigError, MismatchError, UnsupportedError
from octavo.formats.architectures import layer_index
from octavo.modules.kv_storage import Granularity, KVStorage
from octavo.ops.attention import DECODED_AT_ONCE, CachedKV, attend, decoded, why_not
from octavo.store.scales import Scales

ATTENTION = "octavo"


class Float8Cache(Cache):  # type: ignore[misc]
    """Keys (after rotary embedding) and values as E4M3 codes, at about half the memory of 16 bit.

    model: a Transformers model; if its attention is `sdpa` it becomes `octavo`, which is the same for 16-bit caches.
    scales: of keys and values by layer: scales.json of `octavo calibrate`, a Scales, or a mapping {layer: (k, v)};
        then `tensor` is the granularity, one scale each for a layer's keys and values.
    granularity: default `token-head` without scales: one for each token and head, found as they are written. `tensor`
        without scales has 1.0.
    capacity: tokens to make room for at once; default: it grows.

    Full and sliding-window attention are in FP8; other state (convolutions, recurrences) stays as it is.
    ConfigError: a scale that is not above 0, or an unknown granularity. MismatchError: scales of other layers.
    UnsupportedError: a model with no such layer; a gradient through it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        scales: Scales | Path | str | Mapping[int, tuple[float, float]] | None = None,
        granularity: Granularity | None = None,
        capacity: int = 0,
    ) -> None:
        granularity = granularity or ("token-head" if scales is None else "tensor")
        if granularity not in ("tensor", "token-head") or (granularity == "token-head" and scales is not None):
            need = "tensor, or token-head without scales"
            raise ConfigError("Float8Cache: granularity", got=granularity, need=need)
        plain = DynamicCache(config=cast(Any, model).config).layers
        found = layer_scales(scales, [i for i, layer in enumerate(plain) if window_of(layer) is not None])
        layers = []
        for i, layer in enumerate(plain):
            window = window_of(layer)
            storage = KVStorage(granularity, found.get(i, (1.0, 1.0)), 0 if window else capacity, window or 0)
            layers.append(layer if window is None else StoredLayer(storage))
        if not any(isinstance(layer, StoredLayer) for layer in layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no layers"
            fix = "Use Transformers' own cache."
            raise UnsupportedError("Float8Cache: nothing of this model", got=kinds, need="layers of attention", fix=fix)
        use_attention(model)
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Of the layers in FP8."""
        return sum(layer.storage.nbytes for layer in self.layers if isinstance(layer, StoredLayer))


def layer_scales(
    scales: Scales | Path | str | Mapping[int, tuple[float, float]] | None, layers: list[int]
) -> dict[int, tuple[float, float]]:
    """Layer -> scales of keys and values, for all of `layers` or, without scales, for none."""
    if scales is None:
        return {}
    if isinstance(scales, (str, Path)):
        scales = Scales.load(scales)
    if isinstance(scales, Scales):
        scales = {cast(int, layer_index(name)): (kv.k_scale, kv.v_scale) for name, kv in scales.kv.items()}
    if set(scales) != set(layers):
        need = f"those of this model: {layers[0]} to {layers[-1]}" if layers else "a model with attention"
        fix = "Calibrate this model: octavo calibrate MODEL --out scales.json"
        raise MismatchError("Float8Cache: scales of other layers", got=str(sorted(scales)[:8]), need=need, fix=fix)
    return dict(scales)


def window_of(layer: Any) -> int | None:
    """What a layer of Transformers' own cache sees, 0 for all; None for one that keeps more than keys and values."""
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    return 0 if type(layer) is DynamicLayer else None


class StoredLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache: Transformers' words for what KVStorage does."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, storage: KVStorage) -> None:
        super().__init__()
        self.storage = storage
        self.sliding_window = storage.window

    @property
    def is_sliding(self) -> bool:
        return self.storage.window > 0

    @property
    def is_croppable(self) -> bool:
        return not self.is_sliding or self.storage.recording or self.storage.total < self.storage.window

    @property
    def record_past(self) -> bool:
        return self.storage.recording

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states, value_states [B, H, n, D] -> all that the n tokens see, as CodedStates."""
        self.is_initialized = True
        kv = self.storage.append(key_states.detach(), value_states.detach())
        return _coded(key_states, kv, "keys"), _coded(value_states, kv, "values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.storage.kept
        return kept + query_length, self.storage.total - kept

    def get_seq_length(self) -> int:
        return self.storage.total

    def get_max_length(self) -> int:
        return self.storage.window or self.storage.capacity or -1

    def reset(self) -> None:
        self.storage.reset()

    def activate_past_recording(self) -> None:
        self.storage.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """tokens_to_remove: how many, negative."""
        if tokens_to_remove > 0:
            raise ConfigError("Float8Cache.crop", got=str(tokens_to_remove), need="minus the tokens to take back")
        if self.storage.total:  # a layer that reads another's keys has none
            self.storage.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.storage.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.storage.kv is not None:
            rows = torch.arange(len(self.storage.kv.keys), device=self.storage.kv.keys.device)
            self.storage.select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.storage.kv is not None:
            rows = torch.arange(len(self.storage.kv.keys), device=indices.device)
            self.storage.select(rows[indices])  # indices may be a mask

    def offload(self) -> None:
        raise UnsupportedError("Float8Cache", got="offloading", fix="Use it without: it has half the size.")


class CodedStates(torch.Tensor):
    """Keys or values [B, H, n, D] of a cache. To any operation of torch they are decoded, in `dtype`."""

    kv: CachedKV
    side: str

    @staticmethod
    def __new__(cls, kv: CachedKV, side: str, dtype: torch.dtype) -> CodedStates:
        codes = getattr(kv, side)
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.kv, made.side = kv, side
        return made

    def decode(self) -> torch.Tensor:
        scale = self.kv.k_scale if self.side == "keys" else self.kv.v_scale
        return decoded(getattr(self.kv, self.side), scale, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(CodedStates, CodedStates.decode, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Stored(torch.autograd.Function):
    """What was stored, as CodedStates; a gradient would end here, so it is an error."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, kv: CachedKV, side: str) -> CodedStates:
        return CodedStates(kv, side, states.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        fix = "Train without a cache: use_cache=False."
        raise UnsupportedError("Float8Cache", got="a gradient through keys or values that were rounded", fix=fix)


def _coded(states: torch.Tensor, kv: CachedKV, side: str) -> CodedStates:
    if states.requires_grad and torch.is_grad_enabled():
        return cast(CodedStates, _Stored.apply(states, kv, side))  # type: ignore[no-untyped-call]
    return CodedStates(kv, side, states.dtype)


def use_attention(model: nn.Module) -> None:
    """Let a model whose attention is `sdpa` take `octavo` instead."""
    register_attention()
    changed = cast(Any, model)
    if changed.config._attn_implementation == "sdpa":
        changed.set_attn_implementation(ATTENTION)


@cache
def register_attention() -> None:
    """Make `attn_implementation="octavo"` known to Transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: query [B, Hq, n, D] -> [B, n, Hq, D]. One new token reads the codes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as plain

    if options.get("s_aux") is not None:
        raise UnsupportedError("attention 'octavo'", got="attention sinks", fix="Use attn_implementation='eager'.")
    options["scaling"] = scaling
    if not isinstance(key, CodedStates) or key.requires_grad:
        return cast("tuple[torch.Tensor, None]", plain(module, query, key, value, attention_mask, **options))
    if reads_codes(query, key.kv, attention_mask, options):
        mask = None if attention_mask is None else attention_mask[:, 0, 0].expand(len(query), -1).contiguous()
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query[:, :, 0], key.kv, scale, key.shape[2], mask=mask)[:, None], None
    return _by_heads(plain, module, query, key, attention_mask, options), None


def reads_codes(query: torch.Tensor, kv: CachedKV, mask: torch.Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether the kernels take this call: one new token, no gradient, dropout or bias, a mask that heads share."""
    if query.shape[2] != 1 or query.requires_grad or options.get("dropout") or _not_plain(options):
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return False
    same_width = kv.keys.shape == kv.values.shape and query.shape[-1] == kv.head
    return same_width and why_not(kv.head, query.device, query.dtype, kv.kind) is None


def _not_plain(options: Mapping[str, Any]) -> bool:
    """Whether scores are more than q k^T: plain attention takes it or says no."""
    return any(options.get(name) is not None for name in ("position_bias", "softcap"))


def _by_heads(
    plain: Any, module: nn.Module, query: torch.Tensor, key: CodedStates, mask: torch.Tensor | None, options: Any
) -> torch.Tensor:
    """Plain attention, a few key heads at a time, so that little of the cache is decoded at once."""
    batch, heads, tokens, width = key.shape
    group = query.shape[1] // heads
    at_once = max(1, min(heads, DECODED_AT_ONCE // max(1, batch * tokens * width)))
    found = []
    for first in range(0, heads, at_once):
        last = min(heads, first + at_once)
        some = query[:, first * group : last * group]
        part = mask if mask is None or mask.shape[1] == 1 else mask[:, first * group : last * group]
        keys, values = key.kv.heads(first, last).decoded(key.dtype)
        found.append(plain(module, some, keys, values, part, **options)[0])
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
