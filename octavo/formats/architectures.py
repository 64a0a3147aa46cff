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

# Siblings that engines fuse into one matrix, in the fused order. All shards get one precision, and with per-tensor
# scales one common scale. Sources: packed_modules_mapping of vLLM's models; MLA: fused_qkv_a_proj of DeepSeek-V2/V3.
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}

# Modules that are one fused matrix on disk already: rows of each shard are decided by the config, not by a name.
FUSED_ON_DISK = frozenset({"qkv_proj", "gate_up_proj", "qkv", "Wqkv", "c_attn", "query_key_value"})

# Matrices whose input dimension is split across tensor-parallel ranks; every other linear is split by output rows.
ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2", "out_proj", "dense", "c_proj", "fc2", "wo"})

TOWER_SEGMENTS = frozenset(
    {"visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens"}
    | {"audio_tower", "audio_model", "audio_encoder", "embed_vision", "embed_audio"}
    | {"multi_modal_projector", "mm_projector", "connector", "image_newline", "aligner"}
)
HEADS = frozenset({"lm_head", "embed_out", "output_layer"})
EMBEDDINGS = frozenset(
    {"embed_tokens", "wte", "wpe", "word_embeddings", "position_embeddings", "embed_positions", "embed_in"}
)
ROUTERS = frozenset({"router", "gate", "shared_expert_gate", "switch"})
MOE_BLOCKS = frozenset({"mlp", "block_sparse_moe", "moe", "feed_forward", "ffn"})
MTP_SEGMENTS = frozenset({"mtp", "mtp_layers", "mtp_block", "nextn"})

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
    if _STACKED.search(tensor):
        return "expert" if len(shape) == 3 else "other"
    if module in HEADS or leaf in HEADS:
        return "head"
    if module in EMBEDDINGS:
        return "embedding"
    if "norm" in module.lower() or module.startswith("ln_"):
        return "norm"
    if module in ROUTERS and (module != "gate" or (len(parts) > 2 and parts[-3] in MOE_BLOCKS)):
        return "router"
    if leaf == "weight" and len(shape) == 2:
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
