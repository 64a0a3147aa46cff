"""Tensors of a model by formula, from its config.json: name -> shape, as Transformers 5 holds the model in memory.

One entry per family that is known exactly; whatever differs between families is data. Tests compare every family with
the parameters Transformers itself would make. A family that is not here is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError, did_you_mean
from octavo.workflows.planner.config import head_dim, number, numbers, text_config

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """How a decoder differs from Llama's. norms: those of a layer over the hidden size. qkv_bias, o_bias: a fixed
    answer, or the config key that has it. qk_norm: `head` (one weight of head_dim), `full` (of the whole projection).
    attention, mlp: names below. tied: the default of tie_word_embeddings where the config does not say.

    scores: bytes per head and key that attention keeps where the class has no fused kernel. gated: values of the MLP's
    width that its activation keeps.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    qk_norm: str = ""
    attention: str = "gqa"
    mlp: str = "gated"
    tied: bool = False
    scores: int = 0
    gated: int = 3


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias"),
    "mistral": Family(),
    "granite": Family(qkv_bias="attention_bias", o_bias="attention_bias"),
    "smollm3": Family(qkv_bias="attention_bias", o_bias="attention_bias", tied=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head"),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=_FOUR_NORMS, tied=True, scores=8),
    "gemma3_text": Family(norms=_FOUR_NORMS, qk_norm="head", tied=True),
    "phi3": Family(attention="fused", mlp="fused"),
    "olmo2": Family(norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="full"),
    "mixtral": Family(mlp="mixtral"),
    "qwen2_moe": Family(qkv_bias="qkv_bias", mlp="qwen2_moe"),
    "qwen3_moe": Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", mlp="qwen3_moe"),
    "gpt_oss": Family(qkv_bias=True, o_bias=True, attention="sinks", mlp="gpt_oss", scores=2, gated=6),
    "deepseek_v2": Family(attention="mla", mlp="deepseek"),
    "deepseek_v3": Family(attention="mla", mlp="deepseek"),
}


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of the model, towers included. ConfigError for a family, tower or quantization unknown here."""
    text = text_config(config)
    kind = str(text.get("model_type"))
    if kind not in FAMILIES:
        fix = f"{did_you_mean(kind, FAMILIES)} Or give the folder with its safetensors files: their headers are exact."
        raise ConfigError(f"model_type '{kind}' has no formula here", fix=fix)
    family = FAMILIES[kind]
    h, vocab = number(text, "hidden_size"), number(text, "vocab_size")
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, h)}
    for layer in range(number(text, "num_hidden_layers")):
        prefix = f"model.layers.{layer}."
        for norm in family.norms:
            shapes[f"{prefix}{norm}.weight"] = (h,)
        for name, shape in (ATTENTION[family.attention](text, family) | MLP[family.mlp](text, layer)).items():
            shapes[prefix + name] = shape
    shapes["model.norm.weight"] = (h,)
    if not is_tied(config):
        shapes["lm_head.weight"] = (vocab, h)
    return shapes | _towers(config, text)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding table. The outer config decides where there are two, as in Transformers."""
    text = text_config(config)
    family = FAMILIES.get(str(text.get("model_type")), Family())
    value = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return family.tied if value is None else bool(value)


def _linear(name: str, rows: int, cols: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (rows, cols)} | ({f"{name}.bias": (rows,)} if bias else {})


def _gqa(text: Mapping[str, Any], family: Family) -> Shapes:
    h, heads, hd = number(text, "hidden_size"), number(text, "num_attention_heads"), head_dim(text)
    kv = number(text, "num_key_value_heads", default=heads)
    qkv_bias = (
        bool(text.get(family.qkv_bias, family.qkv_bias == "qkv_bias"))
        if isinstance(family.qkv_bias, str)
        else (family.qkv_bias)
    )
    o_bias = bool(text.get(family.o_bias, False)) if isinstance(family.o_bias, str) else family.o_bias
    shapes: Shapes = {}
    for name, rows in (("q", heads * hd), ("k", kv * hd), ("v", kv * hd)):
        shapes |= _linear(f"self_attn.{name}_proj", rows, h, qkv_bias)
    shapes |= _linear("self_attn.o_proj", h, heads * hd, o_bias)
    if family.qk_norm:
        full = family.qk_norm == "full"
        shapes["self_attn.q_norm.weight"] = (heads * hd if full else hd,)
        shapes["self_attn.k_norm.weight"] = (kv * hd if full else hd,)
    return shapes


def _sinks(text: Mapping[str, Any], family: Family) -> Shapes:
    return _gqa(text, family) | {"self_attn.sinks": (number(text, "num_attention_heads"),)}


def _fused(text: Mapping[str, Any], family: Family) -> Shapes:
    h, heads, hd = number(text, "hidden_size"), number(text, "num_attention_heads"), head_dim(text)
    kv = number(text, "num_key_value_heads", default=heads)
    return _linear("self_attn.qkv_proj", (heads + 2 * kv) * hd, h) | _linear("self_attn.o_proj", h, heads * hd)


def _mla(text: Mapping[str, Any], family: Family) -> Shapes:
    """Multi-head latent attention of DeepSeek-V2 and V3: keys and values from a low-rank latent, queries optionally."""
    h, heads = number(text, "hidden_size"), number(text, "num_attention_heads")
    rank, rope = number(text, "kv_lora_rank"), number(text, "qk_rope_head_dim")
    nope, v = number(text, "qk_nope_head_dim"), number(text, "v_head_dim")
    bias = bool(text.get("attention_bias", False))
    if text.get("q_lora_rank"):
        q_rank = number(text, "q_lora_rank")
        shapes = _linear("self_attn.q_a_proj", q_rank, h, bias) | {"self_attn.q_a_layernorm.weight": (q_rank,)}
        shapes |= _linear("self_attn.q_b_proj", heads * (nope + rope), q_rank)
    else:
        shapes = _linear("self_attn.q_proj", heads * (nope + rope), h)
    shapes |= _linear("self_attn.kv_a_proj_with_mqa", rank + rope, h, bias)
    shapes["self_attn.kv_a_layernorm.weight"] = (rank,)
    shapes |= _linear("self_attn.kv_b_proj", heads * (nope + v), rank)
    return shapes | _linear("self_attn.o_proj", h, heads * v, bias)


def _gated(text: Mapping[str, Any], layer: int, width: int = 0, prefix: str = "mlp.") -> Shapes:
    h, f = number(text, "hidden_size"), width or number(text, "intermediate_size")
    bias = bool(text.get("mlp_bias", False))
    shapes = _linear(f"{prefix}gate_proj", f, h, bias) | _linear(f"{prefix}up_proj", f, h, bias)
    return shapes | _linear(f"{prefix}down_proj", h, f, bias)


def _fused_mlp(text: Mapping[str, Any], layer: int) -> Shapes:
    h, f = number(text, "hidden_size"), number(text, "intermediate_size")
    return _linear("mlp.gate_up_proj", 2 * f, h) | _linear("mlp.down_proj", h, f)


def _experts(h: int, count: int, width: int) -> Shapes:
    return {
        "mlp.gate.weight": (count, h),
        "mlp.experts.gate_up_proj": (count, 2 * width, h),
        "mlp.experts.down_proj": (count, h, width),
    }


def _mixtral(text: Mapping[str, Any], layer: int) -> Shapes:
    return _experts(number(text, "hidden_size"), number(text, "num_local_experts"), number(text, "intermediate_size"))


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    step = number(text, "decoder_sparse_step", default=1)
    return layer not in numbers(text, "mlp_only_layers") and (layer + 1) % step == 0


def _qwen3_moe(text: Mapping[str, Any], layer: int) -> Shapes:
    if not _is_sparse(text, layer):
        return _gated(text, layer)
    count = number(text, "num_experts", "num_local_experts")  # Transformers 5 writes the second
    return _experts(number(text, "hidden_size"), count, number(text, "moe_intermediate_size"))


def _qwen2_moe(text: Mapping[str, Any], layer: int) -> Shapes:
    shapes = _qwen3_moe(text, layer)
    if _is_sparse(text, layer):
        width = number(text, "shared_expert_intermediate_size")
        shapes |= _gated(text, layer, width, "mlp.shared_expert.")
        shapes["mlp.shared_expert_gate.weight"] = (1, number(text, "hidden_size"))
    return shapes


def _gpt_oss(text: Mapping[str, Any], layer: int) -> Shapes:
    h, count, f = number(text, "hidden_size"), number(text, "num_local_experts"), number(text, "intermediate_size")
    return _linear("mlp.router", count, h, True) | {
        "mlp.experts.gate_up_proj": (count, h, 2 * f),
        "mlp.experts.gate_up_proj_bias": (count, 2 * f),
        "mlp.experts.down_proj": (count, f, h),
        "mlp.experts.down_proj_bias": (count, h),
    }


def _deepseek(text: Mapping[str, Any], layer: int) -> Shapes:
    if layer < number(text, "first_k_dense_replace", default=0) or not text.get("n_routed_experts"):
        return _gated(text, layer)
    count, width = number(text, "n_routed_experts"), number(text, "moe_intermediate_size")
    shapes = _experts(number(text, "hidden_size"), count, width)
    if text.get("model_type") == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (count,)
    shared = width * number(text, "n_shared_experts", default=0)
    return shapes | (_gated(text, layer, shared, "mlp.shared_experts.") if shared else {})


ATTENTION: dict[str, Callable[[Mapping[str, Any], Family], Shapes]] = {
    "gqa": _gqa, "sinks": _sinks, "fused": _fused, "mla": _mla,
}  # fmt: skip
MLP: dict[str, Callable[[Mapping[str, Any], int], Shapes]] = {
    "gated": _gated, "fused": _fused_mlp, "mixtral": _mixtral, "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss, "deepseek": _deepseek,
}  # fmt: skip


def _towers(config: Mapping[str, Any], text: Mapping[str, Any]) -> Shapes:
    from octavo.workflows.planner.towers import projector, tower

    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        for key in ("audio_config", "vision_config", "vision_tower"):
            if config.get(key):
                raise ConfigError(f"config.json: {key} has no formula here", fix="Give the folder with its weights.")
        return {}
    return tower(vision) | projector(config, vision, number(text, "hidden_size"))
