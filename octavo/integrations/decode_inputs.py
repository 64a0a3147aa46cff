"""What a decoding loop is given, looked at before anything runs: on a GPU a wrong index ends the process."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers import GenerationConfig

from octavo.base.errors import ConfigError, MismatchError, ShapeError, UnsupportedError

STOP_TOKENS = 16
Weights = list[tuple[nn.Module, str, int]]


def is_padded(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocabulary: int) -> bool:
    """Whether a row of input_ids [B, P] has padding.

    ShapeError: no tokens, or a mask of another shape. MismatchError: a token that the model has no embedding for.
    UnsupportedError: padding that is not at the left.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ShapeError("Decoder: input_ids", got=str(list(input_ids.shape)), need="[rows, tokens], one or more")
    low, high = torch.stack(torch.aminmax(input_ids)).tolist()
    if low < 0 or high >= vocabulary:
        fix = "Use the model's own tokenizer, or resize its embeddings."
        got = f"token {low if low < 0 else high}"
        raise MismatchError("Decoder: input_ids", got=got, need=f"0 to {vocabulary - 1}, its embeddings", fix=fix)
    if attention_mask is None:
        return False
    if attention_mask.shape != input_ids.shape:
        got = str(list(attention_mask.shape))
        raise ShapeError("Decoder: attention_mask", got=got, need=f"{list(input_ids.shape)}, that of input_ids")
    seen = attention_mask != 0
    if not bool((seen[:, 1:] >= seen[:, :-1]).all() & seen[:, -1].all()):
        fix = "Tokenize with padding_side='left', or use model.generate without custom_generate."
        got = "zeros behind ones, or a row of zeros"
        raise UnsupportedError("Decoder: attention_mask", got=got, need="padding at the left", fix=fix)
    return not bool(seen.all())


def end_tokens(config: GenerationConfig, device: torch.device) -> torch.Tensor | None:
    """int64 [n]: what ends a row, or None."""
    ends = config._eos_token_tensor
    if ends is None:
        return None
    ends = cast(torch.Tensor, ends).to(device).reshape(-1)
    if len(ends) > STOP_TOKENS:
        raise UnsupportedError("Decoder", got=f"{len(ends)} tokens that end a row", need=f"{STOP_TOKENS} at most")
    return ends


def pad_token(config: GenerationConfig, ends: torch.Tensor, vocabulary: int) -> int:
    """What rows that have ended go on with. ConfigError: the model has no embedding for it."""
    pad = int(config._pad_token_tensor) if config._pad_token_tensor is not None else int(ends[0])
    if not 0 <= pad < vocabulary:
        fix = "Name another: generate(pad_token_id=...)."
        raise ConfigError("Decoder: pad_token_id", got=str(pad), need=f"0 to {vocabulary - 1}, its embeddings", fix=fix)
    return pad


def weights_of(model: nn.Module) -> Weights:
    """Where every parameter lies."""
    found = [(module, name, value) for module in model.modules() for name, value in module._parameters.items()]
    return [(module, name, value.data_ptr()) for module, name, value in found if value is not None]


def require_same(weights: Weights) -> None:
    """ConfigError where a parameter lies elsewhere: what a decoder has packed or captured are the old ones."""
    for module, name, address in weights:
        value = module._parameters.get(name)
        if value is None or value.data_ptr() != address:
            got = f"a {type(module).__name__} whose {name} was moved or exchanged since it was made"
            raise ConfigError("Decoder", got=got, need="the weights as they were", fix="Make a new decoder.")
