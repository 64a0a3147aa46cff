"""A prompt, or one token a row, through a decoder: packed products, and one kernel where Transformers has many.

Llama, Mistral, Qwen2 and Qwen3, with weights in FP8 or 16 bit. A step depends on no value on the host, so that a CUDA
graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache

from octavo.base.errors import UnsupportedError
from octavo.integrations.drop_in import FuseInTraining
from octavo.integrations.float8_cache import window_of
from octavo.integrations.layers import ACTIVATIONS, decoder
from octavo.modules.packed import PackedLinears
from octavo.ops.attention import CachedKV, attend, attend_prompt
from octavo.ops.decode import HeadNorms, Positions, gate, residual_norm, rotate_and_append

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
TOKENS_AT_ONCE = 4096  # of a prompt: what lies between two products stays small beside the weights
MOVING_ROTARY = ("dynamic", "longrope")  # whose tables depend on how long the sequence is


@dataclass(frozen=True)
class _Norm:
    weight: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, module: nn.Module) -> _Norm:
        return cls(cast(nn.Parameter, module.weight).detach(), float(cast(Any, module).variance_epsilon))


@dataclass(frozen=True)
class _Layer:
    before: _Norm
    qkv: PackedLinears
    head_norms: HeadNorms | None
    o: PackedLinears
    between: _Norm
    gate_up: PackedLinears
    down: PackedLinears
    window: int
    scaling: float


class DecoderStep:
    """tokens [B] -> logits [B, V], keys and values appended to a cache of each layer; `prompt`: tokens [B, P].

    Weights are the model's own; those of q, k, v and of gate, up become views of packed ones. UnsupportedError, with
    the reason: an architecture, a layer or a rotary embedding that a step does not know.
    """

    def __init__(self, model: nn.Module, capacity: int) -> None:
        config = cast(Any, model).config
        _refuse(model, config)
        base = cast(Any, decoder(model))
        self.embedding = base.embed_tokens
        self.head = cast(Any, model).get_output_embeddings()
        self.vocabulary = int(self.embedding.num_embeddings)
        self.final = _Norm.of(base.norm)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dtype, device = self.embedding.weight.dtype, self.embedding.weight.device
        windows = [window_of(layer) or 0 for layer in DynamicCache(config=config).layers]
        self.layers = [_layer(layer, window) for layer, window in zip(base.layers, windows, strict=True)]
        self.width = int(base.layers[0].self_attn.head_dim)
        places = torch.arange(capacity, device=device)[None]
        cosine, sine = base.rotary_emb(torch.empty(0, dtype=self.dtype, device=device), places)
        self.tables = [table[0, :, : self.width // 2].contiguous() for table in (cosine, sine)]

    def __call__(
        self,
        tokens: torch.Tensor,
        caches: Sequence[CachedKV],
        length: torch.Tensor,
        mask: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """length: int32 [1], tokens in the caches. mask: uint8 [B, capacity], zero where a row has none; padding: int32
        [B], how many of those are before its first."""

        def attention(q: torch.Tensor, kv: CachedKV, layer: _Layer) -> torch.Tensor:
            return attend(q[:, 0], kv, layer.scaling, 1, length=length, mask=mask, window=layer.window)

        residual, delta = self._through(tokens[:, None], caches, length, padding, attention)
        return self._logits(residual, delta)

    def prompt(
        self,
        tokens: torch.Tensor,
        caches: Sequence[CachedKV],
        mask: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens [B, P], P >= 1, to places 0 to P of the caches -> logits [B, V] of the last ones.

        last: int64 [1], the place whose logits are wanted instead, in a prompt of TOKENS_AT_ONCE in all or less.
        """
        batch, count = tokens.shape
        size = max(1, TOKENS_AT_ONCE // batch)
        for begin in range(0, count, size):
            part = tokens[:, begin : begin + size]
            length = torch.full((1,), begin, dtype=torch.int32, device=tokens.device)

            def attention(q: torch.Tensor, kv: CachedKV, layer: _Layer, begin: int = begin) -> torch.Tensor:
                return attend_prompt(q, kv, layer.scaling, begin, mask=mask, window=layer.window)

            found = self._through(part, caches, length, padding, attention)
        residual, delta = (
            x[:, -1].contiguous() if last is None else x.index_select(1, last)[:, 0]
            for x in (y.view(batch, -1, y.shape[-1]) for y in found)
        )
        return self._logits(residual, delta)

    def _through(
        self,
        tokens: torch.Tensor,
        caches: Sequence[CachedKV],
        length: torch.Tensor,
        padding: torch.Tensor | None,
        attention: Callable[[torch.Tensor, CachedKV, _Layer], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [B, n] -> the residual [B n, K] and what the last layer adds to it.

        attention: of queries [B, n, Hq, D] whose keys and values have been appended.
        """
        positions = Positions(self.tables[0], self.tables[1], padding)
        residual = self.embedding(tokens).flatten(0, 1)
        delta: torch.Tensor | None = None
        for layer, kv in zip(self.layers, caches, strict=True):
            x = residual_norm(delta, residual, layer.before.weight, layer.before.epsilon)
            q = rotate_and_append(layer.qkv(x), kv, self.heads, positions, length, layer.head_norms)
            delta = layer.o(attention(q, kv, layer).reshape(len(residual), -1))
            x = residual_norm(delta, residual, layer.between.weight, layer.between.epsilon)
            delta = layer.down(gate(layer.gate_up(x), self.activation))
        return residual, cast(torch.Tensor, delta)

    def _logits(self, residual: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(residual_norm(delta, residual, self.final.weight, self.final.epsilon)))


def _layer(layer: Any, window: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if (q_norm := getattr(attention, "q_norm", None)) is not None:
        queries, keys = _Norm.of(q_norm), _Norm.of(attention.k_norm)
        norms = HeadNorms(queries.weight, keys.weight, queries.epsilon)
    return _Layer(
        before=_Norm.of(layer.input_layernorm),
        qkv=PackedLinears([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norms=norms,
        o=PackedLinears([attention.o_proj]),
        between=_Norm.of(layer.post_attention_layernorm),
        gate_up=PackedLinears([mlp.gate_proj, mlp.up_proj]),
        down=PackedLinears([mlp.down_proj]),
        window=window,
        scaling=float(attention.scaling),
    )


def _refuse(model: nn.Module, config: Any) -> None:
    what, kind = "one graph for a decoding step", getattr(config, "model_type", None)
    fix = "Use model.generate without it."
    if kind not in ARCHITECTURES:
        raise UnsupportedError(what, got=f"model type '{kind}'", need=", ".join(ARCHITECTURES), fix=fix)
    if config.hidden_act not in ACTIVATIONS:
        raise UnsupportedError(what, got=f"activation '{config.hidden_act}'", need=", ".join(ACTIVATIONS), fix=fix)
    sizes = config.hidden_size, config.intermediate_size
    if any(size % 8 for size in sizes):
        raise UnsupportedError(what, got=f"layers of {sizes[0]} and {sizes[1]} values", need="multiples of 8", fix=fix)
    rotary = config.rope_parameters.get("rope_type", "default")
    if rotary in MOVING_ROTARY:
        raise UnsupportedError(what, got=f"rotary embedding '{rotary}', which changes with the length", fix=fix)
    known, says = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
    if says.out_features > known.num_embeddings:
        got = f"logits of {says.out_features} tokens, embeddings of {known.num_embeddings}"
        raise UnsupportedError(what, got=got, need="an embedding for every token", fix=fix)
    hooks = (
        (name, hook)
        for name, module in model.named_modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    hooked = [name for name, hook in hooks if not isinstance(hook, FuseInTraining)]
    if hooked:
        raise UnsupportedError(what, got=f"a hook on '{hooked[0]}'", need="a model without hooks", fix=fix)
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedError(what, got="a model on several devices", need="one", fix=fix)
