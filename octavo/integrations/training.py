"""The model side of a fine-tune: the base it starts from, and its perplexity on text that it is not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from octavo.base.log import progress
from octavo.formats.recipe import Recipe
from octavo.integrations.measuring import compute_dtype, load_16bit, logits
from octavo.integrations.transformers import load
from octavo.modules.divergence import Perplexity, window_nll
from octavo.store.scales import Scales

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_base(
    folder: Path, recipe: Recipe | None, *, device: str | None = None, scales: Scales | None = None
) -> PreTrainedModel:
    """The model in `folder`, in FP8 by `recipe`, or in the 16-bit weights it is stored in for None.

    What is not FP8 computes in float32 on a CPU, where 16-bit arithmetic is slow, and in bfloat16 on a GPU.
    """
    dtype = compute_dtype("auto", device)
    if recipe is None:
        return load_16bit(folder, device=device, dtype=dtype)
    return load(folder, recipe, device=device, dtype=dtype, activation=recipe.activation, scales=scales)


@torch.no_grad()
def held_out_perplexity(model: nn.Module, windows: torch.Tensor) -> float:
    """exp of the mean nll, nats per predicted token, over windows of tokens, int64 [n, T]. Keeps the mode."""
    training = model.training
    model.eval()
    nll = []
    with progress("Held-out perplexity", len(windows)) as advance:
        for window in windows:
            nll.append(window_nll(logits(model, window).cpu(), window))
            advance(1)
    model.train(training)
    return Perplexity.of(nll).value
