"""What config.json says the shapes are. A weight that has the other orientation was transposed on its way to disk.

Only numbers that the config really holds take part; a module whose shape cannot be derived is not judged.
"""

from __future__ import annotations

from octavo.workflows.rules.findings import REQUANTIZE, Findings
from octavo.workflows.rules.model import Model, Module

# Families whose language model has exactly these shapes. In others only a swapped orientation is an error.
EXACT = frozenset(
    {"llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl"}
    | {"qwen3_vl", "qwen3_vl_moe", "gemma", "gemma2", "gemma3", "phi3", "smollm3", "olmo", "olmo2", "granite"}
    | {"deepseek_v2", "deepseek_v3", "internlm3", "starcoder2", "cohere", "exaone4"}
)


class Sizes:
    """The sizes of a decoder by config key; None where the config is silent."""

    def __init__(self, model: Model) -> None:
        number = model.number
        self.hidden = number("hidden_size", "n_embd", "d_model")
        self.heads = number("num_attention_heads", "n_head")
        self.kv_heads = number("num_key_value_heads") or self.heads
        per_head = self.hidden // self.heads if self.hidden and self.heads else None
        self.head_dim = number("head_dim") or per_head
        self.inter = number("intermediate_size", "n_inner", "ffn_dim")
        self.experts = number("num_experts", "num_local_experts", "n_routed_experts")
        self.moe_inter = number("moe_intermediate_size") or self.inter
        self.shared_inter = number("shared_expert_intermediate_size")
        shared = number("n_shared_experts")
        if self.shared_inter is None and shared and self.moe_inter:
            self.shared_inter = shared * self.moe_inter
        self.vocab = number("vocab_size")
        self.kv_rank, self.q_rank = number("kv_lora_rank"), number("q_lora_rank")
        self.nope, self.rope = number("qk_nope_head_dim"), number("qk_rope_head_dim")
        self.v_dim = number("v_head_dim")
        self.gated_q = model.text.get("attn_output_gate") is True

    @property
    def is_mla(self) -> bool:
        return None not in (self.kv_rank, self.nope, self.rope, self.v_dim)


def rows_of_shards(sizes: Sizes, leaf: str) -> list[int] | None:
    """The rows of each logical shard of a matrix that is fused on disk already, or None."""
    if leaf == "qkv_proj" and sizes.heads and sizes.kv_heads and sizes.head_dim:
        kv = sizes.kv_heads * sizes.head_dim
        return [sizes.heads * sizes.head_dim, kv, kv]
    if leaf == "gate_up_proj" and sizes.inter:
        return [sizes.inter, sizes.inter]
    return None


def expected(sizes: Sizes, module: Module) -> tuple[int | None, int | None] | None:
    """(rows, columns) of a language model's matrix; None for an extent that the config does not decide."""
    leaf, hidden = module.leaf, sizes.hidden
    if module.role in ("head", "embedding"):
        return sizes.vocab, hidden
    if sizes.is_mla:
        return _expected_mla(sizes, leaf) or _expected_mlp(sizes, module)
    if sizes.heads is None or sizes.head_dim is None or sizes.kv_heads is None:
        return _expected_mlp(sizes, module)
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = {
        "q_proj": (q * (2 if sizes.gated_q else 1), hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "qkv_proj": (q + 2 * kv, hidden),
    }
    return attention.get(leaf) or _expected_mlp(sizes, module)


def _expected_mla(sizes: Sizes, leaf: str) -> tuple[int | None, int | None] | None:
    heads, nope, rope, v_dim, rank = sizes.heads, sizes.nope, sizes.rope, sizes.v_dim, sizes.kv_rank
    if heads is None or nope is None or rope is None or v_dim is None or rank is None:
        return None
    return {
        "q_proj": (heads * (nope + rope), sizes.hidden),
        "q_a_proj": (sizes.q_rank, sizes.hidden),
        "q_b_proj": (heads * (nope + rope), sizes.q_rank),
        "kv_a_proj_with_mqa": (rank + rope, sizes.hidden),
        "kv_b_proj": (heads * (nope + v_dim), rank),
        "o_proj": (sizes.hidden, heads * v_dim),
    }.get(leaf)


def _expected_mlp(sizes: Sizes, module: Module) -> tuple[int | None, int | None] | None:
    parts = module.name.split(".")
    inter = sizes.inter
    if "experts" in parts:
        inter = sizes.moe_inter
    elif "shared_expert" in parts or "shared_experts" in parts:
        inter = sizes.shared_inter
    if module.role == "router":
        return (sizes.experts, sizes.hidden) if module.leaf in ("gate", "router") else None
    return {
        "gate_proj": (inter, sizes.hidden),
        "up_proj": (inter, sizes.hidden),
        "w1": (inter, sizes.hidden),
        "w3": (inter, sizes.hidden),
        "down_proj": (sizes.hidden, inter),
        "w2": (sizes.hidden, inter),
        "gate_up_proj": (2 * inter if inter else None, sizes.hidden),
    }.get(module.leaf)


def check_shapes(model: Model, out: Findings) -> None:
    """Every language-model matrix against config.json."""
    sizes, exact = Sizes(model), model.model_type in EXACT
    for module in model.modules.values():
        if not module.is_matrix or module.role in ("tower", "mtp", "norm", "other") or module.weight is None:
            continue
        want = expected(sizes, module)
        if want is None or None in want:
            continue
        rows, cols = module.weight.shape
        if (rows, cols) == want:
            continue
        text = f"config.json makes it {list(want)}, it is stored as {module.weight.text}"
        if (cols, rows) == want:
            out.error("weight-transposed", module.weight.name, f"The matrix is transposed: {text}.", REQUANTIZE)
        elif exact and not (module.role in ("head", "embedding") and rows >= (want[0] or 0) and cols == want[1]):
            fix = "Give the config.json that belongs to these weights, or the weights again."
            out.error("weight-shape", module.weight.name, f"Its shape does not fit: {text}.", fix)
