"""The model side of a fine-tune: the base it starts from, and its perplexity on text that it is not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from octavo.base.errors import CheckpointError
from octavo.base.log import progress
from octavo.formats.recipe import Recipe
from octavo.integrations.hub import first_line
from octavo.integrations.transformers import auto_class, load, load_config
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
    kind = torch.device(device).type if device else ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    if recipe is not None:
        return load(folder, recipe, device=device, dtype=dtype, activation=recipe.activation, scales=scales)
    config = load_config(folder)
    try:
        model = auto_class(config).from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{folder} does not load in Transformers", got=first_line(error)) from error
    return cast("PreTrainedModel", model.to(kind if device is None else device))


@torch.no_grad()
def held_out_perplexity(model: nn.Module, windows: torch.Tensor) -> float:
    """exp of the mean nll, nats per predicted token, over windows of tokens, int64 [n, T]. Keeps the mode."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    nll = []
    with progress("Held-out perplexity", len(windows)) as advance:
        for window in windows:
            logits: Any = cast(Any, model)(input_ids=window[None].to(device), use_cache=False).logits[0]
            nll.append(window_nll(logits.cpu(), window))
            advance(1)
    model.train(training)
    return Perplexity.of(nll).value
