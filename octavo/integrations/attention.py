"""Which attention a model trains on: the one asked for where it runs, else the next one, named in one warning."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.base.errors import UnsupportedError
from octavo.base.hardware import caps_of
from octavo.base.log import logger
from octavo.base.packages import version_of
from octavo.integrations.hub import first_line

ORDER = ("sdpa", "eager")
NEWEST = "flash_attention_4"  # a step of 8B over FP8 on an H200: 687 ms, and 705 with sdpa
PROBE = 16  # tokens


def choose_attention(model: Any, wanted: str) -> str:
    """Set an attention of Transformers on a model or PeftModel and return its name.

    `auto`: FlashAttention 4 in place of sdpa where it is installed, on SM90 and later, else the model's own.

    Each candidate, `wanted`, then sdpa, then eager, goes forward and backward over a few tokens first: what is not
    installed, not made for this model or GPU, or gives NaN shows here. UnsupportedError where none runs.
    """
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    if wanted == "auto":
        own = str(base.config._attn_implementation)
        if own != "sdpa" or not _newest_pays(next(model.parameters()).device):
            return own
        wanted = NEWEST
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


def _newest_pays(device: torch.device) -> bool:
    return version_of("flash-attn-4") is not None and caps_of(device).sm >= (9, 0)


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
