"""Data only: what the names of a checkpoint mean. Loading, recipes and verify's rules all read it.

Names are module paths as stored, e.g. `model.layers.0.self_attn.q_proj`. Roles:

    linear      a 2-D weight that may be quantized
    expert      the same, inside a mixture of experts; also stacked 3-D parameters
    head        output projection to the vocabulary
    embedding   look-up tables
    norm        normalization weights
    router      chooses experts; tiny and sensitive
    tower       vision or audio encoder and the projector into the language model
    mtp         multi-token-prediction layers, copied through
    other       anything else: biases, convolutions, state-space parameters, scales
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Siblings that engines fuse into one matrix, in the fused order. All shards get one precision, and with per-tensor
# scales one common scale. Sources: packed_modules_mapping of vLLM's models; MLA: fused_qkv_a_proj of DeepSeek-V2/V3.
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}

# Modules that are one fused matrix on disk already: rows of each shard are decided by the config, not by a name.
FUSED_ON_DISK = frozenset({"qkv_proj", "gate_up_proj", "qkv", "Wqkv", "c_attn", "query_key_value"})

# Matrices whose input dimension is split across tensor-parallel ranks; every other linear is split by output rows.
ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2", "out_proj", "dense", "c_proj", "fc2", "wo"})

TOWER_SEGMENTS = frozenset(
    {"visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens"}
    | {"audio_tower", "audio_model", "audio_encoder", "embed_vision", "embed_audio"}
    | {"multi_modal_projector", "mm_projector", "connector", "image_newline", "aligner", "embed_tokens_extend"}
)
HEADS = frozenset({"lm_head", "head", "embed_out", "output_layer", "score", "classifier"})
EMBEDDINGS = frozenset(
    {"embed_tokens", "wte", "wpe", "word_embeddings", "position_embeddings", "embed_positions", "embed_in"}
    | {"token_type_embeddings", "embed_tokens_per_layer"}
)
# weights_proj: the head gate of DeepSeek-V3.2's sparse-attention indexer, built without quantization by engines.
ROUTERS = frozenset({"router", "gate", "shared_expert_gate", "switch", "weights_proj"})
_NAMED_ROUTERS = ROUTERS - {"gate"}  # a router whatever is around it or inside of it; Granite's has a `layer`
MOE_BLOCKS = frozenset({"mlp", "block_sparse_moe", "moe", "feed_forward", "ffn"})
MTP_SEGMENTS = frozenset({"mtp", "mtp_layers", "mtp_block", "nextn"})

# Stacked experts on disk, by model_type: (stored as [E, in, out], gate and up columns interleaved). All others store
# [E, out, in] with gate above up, as Transformers 5 holds them in memory. Sources: the experts' classes and
# conversion_mapping.py of Transformers 5.24.
STACKED_LAYOUT = {
    "gpt_oss": (True, True),
    "llama4": (True, False),
    "llama4_text": (True, False),
    "qwen3_vl_moe": (True, False),
    "qwen3_vl_moe_text": (True, False),
}
# Families whose files name a single expert's matrices w1 (gate), w3 (up), w2 (down); value: the block they live in.
W_NAMES = {
    "mixtral": "block_sparse_moe",
    "minimax": "block_sparse_moe",
    "minimax_m2": "block_sparse_moe",
    "phimoe": "block_sparse_moe",
    "lfm2_moe": "feed_forward",
    "kimi_linear": "block_sparse_moe",
}
# Families whose experts every engine loads from one stacked parameter only: single ones, as FP8 needs them, are lost.
STACKED_ONLY = frozenset({"gpt_oss"})
# Families whose experts were linears in Transformers 4 and are stacked in 5: asked for an adapter on their MLP, PEFT
# puts it on the stacks and makes new weights of all experts in every pass. Source: PEFT's conversion of target_modules.
ADAPTED_STACKS = frozenset({"mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"})


@dataclass(frozen=True)
class DecoderLayer:
    """How a decoder layer is written in Transformers where q_proj, k_proj and v_proj read what input_layernorm gives.

    mlp_norm: its output goes to gate_proj and up_proj, or to the router and experts of a sparse layer. norm_offset:
    what the norms add to their weights. plain: the layer is x + attention(norm(x)), then x + mlp(norm(x)), and no more.
    """

    mlp_norm: str = "post_attention_layernorm"
    norm_offset: float = 0.0
    plain: bool = False


# By the model_type of the text model; what follows the norms otherwise (multipliers, norms behind attention and MLP,
# norms of q and k, biases, sparse MLPs) stays as it is. Source: the modeling files of Transformers 5.24.
_PLAIN, _SANDWICH = DecoderLayer(plain=True), DecoderLayer("pre_feedforward_layernorm", 1.0)
FUSED_DECODERS = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3"), _PLAIN),
    **dict.fromkeys(("granite", "mixtral", "qwen2_moe", "qwen3_moe"), DecoderLayer()),
    "gemma": DecoderLayer(norm_offset=1.0, plain=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), _SANDWICH),
}
# Classes of Transformers that derive from nn.Linear and compute the same; other subclasses may not.
PLAIN_LINEARS = frozenset({"FalconLinear"})
# Linears whose weight the modeling code reads past the layer: Mamba's time step.
READ_AS_WEIGHTS = frozenset({"dt_proj"})
# GPT-2's Conv1D stores its matrices as [in, out]: neither a row nor a block of such a file is what engines multiply.
CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_STACKED = re.compile(r"(?:^|\.)experts\.(gate_up_proj|down_proj|gate_proj|up_proj|w1|w2|w3)$")


def layer_index(name: str) -> int | None:
    """The decoder layer a name belongs to, or None. Towers count their own layers: None."""
    if TOWER_SEGMENTS & set(name.split(".")):
        return None
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def role(tensor: str, shape: tuple[int, ...], layers: int | None = None) -> str:
    """The role of a tensor of this name and shape. layers: num_hidden_layers; later ones are multi-token prediction."""
    parts = tensor.split(".")
    module, leaf = parts[-2] if len(parts) > 1 else "", parts[-1]
    index = layer_index(tensor)
    if MTP_SEGMENTS & set(parts) or (layers is not None and index is not None and index >= layers):
        return "mtp"
    if TOWER_SEGMENTS & set(parts):
        return "tower"
    if any(part.startswith("lora_") for part in parts):
        return "other"
    if _STACKED.search(tensor):
        return "expert" if len(shape) == 3 else "other"
    if module in HEADS or leaf in HEADS:
        return "head"
    if "norm" in module.lower() or module.startswith("ln_"):
        return "norm"
    if module in EMBEDDINGS or "embed" in module:
        return "embedding"
    if _NAMED_ROUTERS & set(parts) or (module == "gate" and len(parts) > 2 and parts[-3] in MOE_BLOCKS):
        return "router"
    if leaf == "weight" and len(shape) == 2 and module not in READ_AS_WEIGHTS:
        return "expert" if "experts" in parts else "linear"
    return "other"


def fused_group(module: str) -> tuple[str, tuple[str, ...]] | None:
    """`a.b.k_proj` -> (`a.b.qkv_proj`, (`a.b.q_proj`, `a.b.k_proj`, `a.b.v_proj`)), or None for a module on its own.

    Whether the siblings exist is for the caller to look up: some models lack one.
    """
    parent, _, leaf = module.rpartition(".")
    prefix = f"{parent}." if parent else ""
    for fused, shards in FUSED.items():
        if leaf in shards:
            return prefix + fused, tuple(prefix + shard for shard in shards)
    return None


def expert_block(module: str) -> str | None:
    """`a.mlp.experts.3.up_proj` -> `a.mlp.experts`: the experts that engines run as one kernel; None outside of one."""
    parts = module.split(".")
    return ".".join(parts[: parts.index("experts") + 1]) if "experts" in parts else None


def shard_rows(module: str, rows: int, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The rows of each shard of a matrix that is fused on disk; None for any other, (1, the rest) where they
    are unknown: ragged for every block size.

    config: the language model's part of config.json.
    """
    leaf = module.rpartition(".")[2]
    if leaf not in FUSED_ON_DISK:
        return None
    if leaf == "gate_up_proj":
        return (rows // 2, rows // 2)
    heads = config.get("num_attention_heads")
    if leaf == "qkv_proj" and isinstance(heads, int) and heads:
        head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
        q, kv = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
        if q + 2 * kv == rows:
            return (q, kv, kv)
    return (1, rows - 1)
