"""Which attention a model trains on: the one asked for where it runs, else the next one, named in one warning."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.base.errors import UnsupportedError
from octavo.base.log import logger
from octavo.integrations.hub import first_line

ORDER = ("sdpa", "eager")
PROBE = 16  # tokens


def choose_attention(model: Any, wanted: str) -> str:
    """Set an attention of Transformers on a model or PeftModel and return its name. `auto`: the model's own.

    Each candidate, `wanted`, then sdpa, then eager, goes forward and backward over a few tokens first: what is not
    installed, not made for this model or GPU, or gives NaN shows here. UnsupportedError where none runs.
    """
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    if wanted == "auto":
        return str(base.config._attn_implementation)
    reasons: list[str] = []
    for name in (wanted, *(other for other in ORDER if other != wanted)):
        try:
            base.set_attn_implementation(name)
            _probe(model)
        except torch.OutOfMemoryError:
            raise
        except (ImportError, ValueError, RuntimeError) as error:
            reasons.append(f"attention {name} does not run: {first_line(error)}")
            continue
        if reasons:
            logger().warning("%s; %s instead", "; ".join(reasons), name)
        return name
    raise UnsupportedError("no attention runs", got="; ".join(reasons))


def _probe(model: Any) -> None:
    """A pass both ways; leaves gradients and the state of random numbers as they were."""
    device = next(model.parameters()).device
    ids = torch.arange(PROBE, device=device)[None]
    devices = [device] if device.type == "cuda" else []
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with torch.random.fork_rng(devices), torch.enable_grad(), autocast:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        trained = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, trained, allow_unused=True) if trained else []
    if not all(bool(value.isfinite().all()) for value in (loss, *grads) if value is not None):
        raise RuntimeError("a loss or gradient that is not finite")
