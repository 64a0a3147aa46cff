"""A model whose KV cache is FP8, one window of tokens at a time, in Transformers: the cache's `update` rounds, and an
attention function around the model's own rounds the queries where an engine does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from octavo.base.errors import ConfigError, UnsupportedError
from octavo.integrations.layers import decoder
from octavo.integrations.measuring import logits, new_cache
from octavo.modules.kv_cache import TENSOR, Float8KVWriter
from octavo.ops.quantize import fake_quantize

PREFIX = "octavo_fp8_query_"


def cached_logits(model: nn.Module, tokens: torch.Tensor, writer: Float8KVWriter, queries: bool) -> torch.Tensor:
    """tokens int64 [T], one sample -> logits [T, V], with the keys and values that `writer` makes of them.

    queries: round those to E4M3 with scale 1, too, in the layers that `writer` rounds: what engines do on GPUs whose
    attention multiplies in FP8. ConfigError for a model that keeps no keys and values; UnsupportedError for one whose
    attention Transformers does not let be replaced.
    """
    cache = new_cache(model)
    with _rounded_queries(model, writer) if queries else nullcontext() as seen:
        result = logits(model, tokens, cache if cache is None else writer.watch(cache))
    if writer.layers is None and not writer.counts:
        raise ConfigError("FP8 KV cache", got="a model that keeps no keys and values", need="attention layers")
    if seen is not None and not seen:
        fix = "Use --kv-query 16bit; FP8 attention kernels would add an error that is not in the figures."
        raise UnsupportedError("rounding queries", got=f"{type(model).__name__} with attention of its own", fix=fix)
    return result


@contextmanager
def _rounded_queries(model: nn.Module, writer: Float8KVWriter) -> Iterator[set[int]]:
    """Inside it, attention rounds its queries. Yields the layers whose attention was called, as they are called."""
    config = cast(Any, decoder(model)).config
    name, seen = config._attn_implementation, set[int]()
    config._attn_implementation = _register(name, writer, seen)
    try:
        yield seen
    finally:
        config._attn_implementation = name


def _register(name: str, writer: Float8KVWriter, seen: set[int]) -> str:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get(name, own)
        layer = int(cast(Any, module).layer_idx)
        seen.add(layer)
        if writer.rounds(layer):
            query = fake_quantize(query, TENSOR, scale=torch.ones((), dtype=torch.float32, device=query.device))
        return inner(module, query, *args, **kwargs)

    ours = PREFIX + name
    ALL_ATTENTION_FUNCTIONS.register(ours, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return ours
