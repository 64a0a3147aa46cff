"""The formulas against the parameters that Transformers itself makes, tensor by tensor."""

import math

import pytest

from octavo.base.errors import ConfigError
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.shapes import FAMILIES, shapes_of

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 24}
MLA = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CLIP, SIGLIP = {"model_type": "clip_vision_model", **TOWER}, {"model_type": "siglip_vision_model", **TOWER}
LLAMA = {"model_type": "llama", **SIZES}
CASES = {
    "llama": LLAMA,
    "llama-biases-tied": {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SIZES, "head_dim": 12},
    "granite": {"model_type": "granite", **SIZES},
    "smollm3": {"model_type": "smollm3", **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **SIZES, "head_dim": 16},
    "gemma3_text": {"model_type": "gemma3_text", **SIZES, "head_dim": 16},
    "phi3": {"model_type": "phi3", **SIZES},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **SIZES, **MOE, "shared_expert_intermediate_size": 40},
    "qwen3_moe-mixed": {"model_type": "qwen3_moe", **SIZES, **MOE, "mlp_only_layers": [1]},
    "gpt_oss": {"model_type": "gpt_oss", **SIZES, "num_local_experts": 4, "head_dim": 16},
    "deepseek_v2-without-q-rank": {"model_type": "deepseek_v2", **SIZES, **MLA, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **SIZES, **MLA, "n_group": 2, "topk_group": 1},
    "llava-clip": {"model_type": "llava", "vision_config": CLIP, "text_config": LLAMA},
    "llava-siglip": {"model_type": "llava", "vision_config": SIGLIP, "text_config": LLAMA},
    "gemma3": {
        "model_type": "gemma3",
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "text_config": {"model_type": "gemma3_text", **SIZES, "head_dim": 16},
    },
}


def in_transformers(config):
    """name -> shape of what Transformers makes for this config, tied ones once, without a byte of memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    made = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(made)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found |= {name: tuple(b.shape) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return made.to_dict(), {n.replace("language_model.", "").replace("vision_model.", ""): s for n, s in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_the_one_transformers_makes(name):
    config, real = in_transformers(CASES[name])
    mine = shapes_of(config)
    assert {n: s for n, s in mine.items() if real.get(n) != s} == {}
    assert {n: s for n, s in real.items() if n not in mine} == {}


@pytest.mark.filterwarnings("ignore:.*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    "name", ["qwen2", "phi3", "mixtral", "qwen2_moe", "qwen3_moe-mixed", "gpt_oss", "deepseek_v3", "llava-clip"]
)
def test_adapters_are_those_that_peft_makes(name):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from octavo.integrations.peft import get_peft_model, lora_config

    made = AutoConfig.for_model(**CASES[name])
    kind = AutoModelForImageTextToText if "vision_config" in CASES[name] else AutoModelForCausalLM
    model = kind.from_config(made)
    model = get_peft_model(model, lora_config(model, rank=4, alpha=8))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert Model.from_config(name, made.to_dict()).adapter_parameters(4) == trained


def test_every_family_is_compared():
    assert {(c.get("text_config") or c)["model_type"] for c in CASES.values()} == set(FAMILIES)


def test_an_unknown_family_is_refused_and_names_the_way_out():
    with pytest.raises(ConfigError, match="'rwkv'") as error:
        shapes_of({**LLAMA, "model_type": "rwkv"})
    assert "safetensors" in error.value.fix


def test_an_unknown_tower_is_refused():
    with pytest.raises(ConfigError, match="pixtral"):
        shapes_of({"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "pixtral"}})


@pytest.mark.parametrize(("key", "value"), [("hidden_size", None), ("hidden_size", "x"), ("vocab_size", -1)])
def test_a_broken_size_names_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        shapes_of({**LLAMA, key: value})


def test_sizes_are_whole_numbers():
    assert all(math.prod(shape) > 0 for config in CASES.values() for shape in shapes_of(config).values())
