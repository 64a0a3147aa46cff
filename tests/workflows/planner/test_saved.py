"""Bytes saved for backward: the formula against what autograd really keeps, hooked tensor by tensor.

The second layer's share, that is two layers minus one. Storages count once, weights not at all.
"""

import pytest

from octavo.workflows.planner.activations import saved_per_token
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.setup import Setup

TOKENS, RANK = 448, 8
SIZES = {
    "vocab_size": 517,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 48},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 48},
    "gemma3_text": {"head_dim": 48},
    "phi3": {},
    "olmo2": {},
    "mixtral": EXPERTS,
    "qwen3_moe": {"head_dim": 48, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160},
    "gpt_oss": {"head_dim": 48, **EXPERTS},
}
FULL = ["llama", "qwen3", "mixtral"]


def really_saved(config, layers, method, autocast, saved_fp8=False):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from octavo import Recipe, convert
    from octavo.integrations.peft import get_peft_model, lora_config

    eager = config["model_type"] in ("gemma2", "gpt_oss")
    made = AutoConfig.for_model(**config | {"num_hidden_layers": layers})
    made.use_cache = False
    dtype = torch.bfloat16 if autocast and method == "lora" else torch.float32
    kind = "eager" if eager else "sdpa"
    model = base = AutoModelForCausalLM.from_config(made, attn_implementation=kind, dtype=dtype)
    if saved_fp8:
        convert(base, Recipe.named("channel", activation="token"))
    if method == "lora":
        model = get_peft_model(base, lora_config(base, rank=RANK, alpha=16))
        model.enable_input_require_grads()
    model.train()
    rows = {TOKENS // 2, TOKENS, 2 * TOKENS}  # no weight has such a size: what has, holds tokens
    saved = {}

    def pack(tensor):
        if rows & set(tensor.shape):
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(3, 500, (2, TOKENS // 2))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        base.model(input_ids=ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def compare(name, method, autocast, saved_fp8=False):
    config = {"model_type": name, **SIZES, **FAMILIES[name]}
    one, two = (really_saved(config, layers, method, autocast, saved_fp8) for layers in (1, 2))
    model = Model.from_config(name, config | {"num_hidden_layers": 2})
    width = 2 if autocast else 4
    setup = Setup(method=method, rank=RANK, context=TOKENS // 2, checkpointing="none", width=width, saved_fp8=saved_fp8)
    return saved_per_token(model, setup, model.widths[0]), (two - one) / TOKENS


@pytest.mark.filterwarnings("ignore:.*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_lora_under_autocast_as_octavo_finetune_trains(name):
    formula, real = compare(name, "lora", True)
    assert formula == pytest.approx(real, rel=0.05 if name in ("mixtral", "qwen3_moe", "gpt_oss") else 0.01)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_fused_layers(name, monkeypatch):
    """Codes instead of 16-bit inputs, where FP8 products are said to run."""
    monkeypatch.setattr("octavo.integrations.fused.products_run", lambda shape, device: True)
    formula, real = compare(name, "lora", True, saved_fp8=True)
    assert formula == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("name", FULL)
def test_full_training_under_autocast(name):
    formula, real = compare(name, "full", True)
    assert formula == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_float32_on_a_cpu(method):
    formula, real = compare("llama", method, False)
    assert formula == pytest.approx(real, rel=0.01)
