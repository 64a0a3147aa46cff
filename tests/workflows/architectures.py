"""Tiny random models of every architecture that verify has rules for, as Transformers saves them."""

from __future__ import annotations

from typing import Any

# whole: every extent is whole blocks of 128. ragged: none of the inner ones is, as in small real models.
SIZES = {
    "whole": {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2},
    "ragged": {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 1},
}
EXPERT = {"whole": 128, "ragged": 96}
BASE = {"vocab_size": 264, "num_hidden_layers": 2, "head_dim": 64, "tie_word_embeddings": False}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}


def _mla(size: str) -> dict[str, Any]:
    rank = 256 if size == "whole" else 96
    sizes = {"q_lora_rank": rank, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return {**sizes, **experts, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT[size]}


def _moe(size: str, count: str = "num_experts") -> dict[str, Any]:
    return {count: 4, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT[size]}


def _qwen_vision(out: int) -> dict[str, Any]:
    return {"hidden_size": 64, "intermediate_size": 96, "depth": 1, "num_heads": 2, "out_hidden_size": out}


def build(name: str, size: str = "whole") -> Any:
    """The Transformers config of a tiny model of this family."""
    import transformers as t

    text = {**BASE, **SIZES[size]}
    hidden = text["hidden_size"]
    local = {**text, "intermediate_size": EXPERT[size], "num_local_experts": 4, "num_experts_per_tok": 2}
    qwen = {"decoder_sparse_step": 1, **_moe(size)}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
    no_dim = {k: v for k, v in text.items() if k != "head_dim"}
    phi = {**no_dim, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    latent = {**text, **_mla(size), "num_key_value_heads": text["num_attention_heads"], "head_dim": 64}
    llama4 = {**local, "num_experts_per_tok": 1, "intermediate_size_mlp": text["intermediate_size"]}
    makers = {
        "llama": lambda: t.LlamaConfig(**text),
        "mistral": lambda: t.MistralConfig(**text),
        "qwen2": lambda: t.Qwen2Config(**no_dim),
        "qwen3": lambda: t.Qwen3Config(**text),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**text, **qwen),
        "gemma2": lambda: t.Gemma2Config(**{**text, "tie_word_embeddings": True}),
        "gemma3_text": lambda: t.Gemma3TextConfig(**{**text, "tie_word_embeddings": True}),
        "phi3": lambda: t.Phi3Config(**phi),
        "mixtral": lambda: t.MixtralConfig(**local),
        "deepseek_v2": lambda: t.DeepseekV2Config(**latent),
        "deepseek_v3": lambda: t.DeepseekV3Config(**latent),
        "gpt_oss": lambda: t.GptOssConfig(**local, sliding_window=16),
        "llama4": lambda: t.Llama4Config(
            text_config=llama4,
            vision_config={**VISION, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        ),
        "gemma3": lambda: t.Gemma3Config(
            text_config={**text, "tie_word_embeddings": True},
            vision_config={**VISION, "image_size": 32, "patch_size": 8},
        ),
        "qwen2_5_vl": lambda: t.Qwen2_5_VLConfig(text_config={**no_dim, **rope}, vision_config=_qwen_vision(hidden)),
        "qwen3_vl": lambda: t.Qwen3VLConfig(
            text_config={**text, **rope}, vision_config={**_qwen_vision(hidden), "deepstack_visual_indexes": [0]}
        ),
        "qwen3_vl_moe": lambda: t.Qwen3VLMoeConfig(
            text_config={**text, **rope, **qwen},
            vision_config={**_qwen_vision(hidden), "deepstack_visual_indexes": [0]},
        ),
        "llava": lambda: t.LlavaConfig(
            text_config=t.LlamaConfig(**text),
            vision_config=t.CLIPVisionConfig(**VISION, image_size=16, patch_size=8),
            image_token_index=263,
        ),
    }
    return makers[name]()


NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "mixtral"),
    *("deepseek_v2", "deepseek_v3", "gpt_oss", "llama4", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava"),
)
EXPERTS = frozenset({"qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4", "qwen3_vl_moe"})
# Served by SGLang with a loader that renames weight_scale_inv.
LLAMA_LOADERS = frozenset({"llama", "mistral", "phi3", "llama4"})
