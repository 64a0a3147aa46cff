"""Models of a published shape with random weights, which have the speed and the size of trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from octavo.formats.recipe import Recipe
from octavo.modules.convert import convert


def random_model(config: Mapping[str, Any], weights: str, device: str) -> nn.Module:
    """A causal language model in BF16, its linears in FP8 per row if weights is `fp8`, without end tokens.

    config: config.json. Frozen, in evaluation mode; inputs of FP8 linears stay in 16 bit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.requires_grad_(False)
    model.generation_config.eos_token_id = None
    return cast(nn.Module, convert(model, Recipe.named("channel", activation="none")) if weights == "fp8" else model)
