"""Models of a published shape with random weights, which have the speed and the size of trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from octavo.formats.recipe import Recipe
from octavo.modules.convert import convert

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 16


def random_model(config: Mapping[str, Any], weights: str, device: str, activation: str = "none") -> nn.Module:
    """A causal language model in BF16, its linears in FP8 per row if weights is `fp8`, without end tokens.

    config: config.json. Frozen, in evaluation mode. activation: what FP8 linears do to their inputs.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.requires_grad_(False)
    model.generation_config.eos_token_id = None
    recipe = Recipe.named("channel", activation=activation)
    return cast(nn.Module, convert(model, recipe) if weights == "fp8" else model)


def random_lora(config: Mapping[str, Any], kind: str, device: str, checkpointing: bool) -> nn.Module:
    """A Llama with adapters of RANK on all linears, in training mode.

    kind: `fused`, FP8 base and fused layers; `one by one`, the same without fusing, both with float32 adapters;
    `float32`, the same codes, all else in float32; `best bf16`, adapters in BF16, compiled layers. `fused` and `best
    bf16` take Liger's loss where it is installed.
    """
    from peft import LoraConfig
    from peft import get_peft_model as plain

    from octavo.base.packages import version_of
    from octavo.integrations.peft import get_peft_model, register

    weights, activation = "bf16" if kind == "best bf16" else "fp8", "none" if kind == "float32" else "token"
    base: Any = random_model({**config, "use_cache": False}, weights, device, activation)
    if kind == "float32":
        base.float()
    if kind in ("fused", "best bf16") and version_of("liger_kernel") is not None:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            model=base, swiglu=False, rms_norm=False
        )  # compiled and fused layers have their own
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEARS, task_type="CAUSAL_LM")
    model: Any
    if kind == "best bf16":
        model = plain(base, lora, autocast_adapter_dtype=False)
    else:
        model = get_peft_model(base, lora) if kind == "fused" else plain(base, register(lora))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if kind == "best bf16":
        for layer in model.base_model.model.model.layers:
            layer.compile()
    return cast(nn.Module, model.train())
