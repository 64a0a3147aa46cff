"""Which attention a model trains on: the one asked for where it runs, else the next one, named in one warning."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward

from octavo.base.errors import UnsupportedError
from octavo.base.hardware import caps_of
from octavo.base.log import logger
from octavo.base.packages import version_of
from octavo.integrations.hub import first_line
from octavo.integrations.seen import Seen

ORDER = ("sdpa", "eager")
NEWEST = "flash_attention_4"  # a step of 8B over FP8 on an H200: 677 ms, and 696 with sdpa
PROBE = 16  # tokens
LONG = 1024  # tokens, from which tiles of one query head are full
OTHERWISE = ("sliding_window", "softcap", "s_aux", "cu_seq_lens_q", "deterministic")  # if given, Transformers' own


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


def take_unpacked_heads(device: torch.device) -> None:
    """Make `unpacked_heads` Transformers' FlashAttention 4 where it pays: on Hopper, with the package installed."""
    deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"  # Transformers' setting
    if version_of("flash-attn-4") is not None and caps_of(device).sm == (9, 0) and not deterministic:
        AttentionInterface.register(NEWEST, unpacked_heads)


def unpacked_heads(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """FlashAttention 4 on a tile of one query head, not of all that share a key head; else as Transformers calls it.

    query [B, Hq, n, D], key and value [B, H, n, D] -> [B, n, Hq, D]. For causal attention to whole sequences, as in
    training; masks, windows, packed or short sequences are Transformers' own. Forward 0.95 ms for 1.12 on an H200 by
    itself (4 x 4096 tokens, 32 heads over 8), 1.04 for 1.06 in a step, whose bound is power.
    """
    if attention_mask is not None or not _whole(module, query, key, value, options):
        return cast(
            tuple[torch.Tensor, None], flash_attention_forward(module, query, key, value, attention_mask, **options)
        )
    from flash_attn.cute import flash_attn_func

    parts = (x.transpose(1, 2) for x in (query, key, value))
    found = flash_attn_func(*parts, softmax_scale=options.get("scaling"), causal=True, pack_gqa=False)
    return found[0] if isinstance(found, tuple) else found, None


def _whole(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> bool:
    """Whether sequences are causal, alone in their rows, and all there is to attend to."""
    causal = options.get("is_causal")
    return (
        not torch.compiler.is_compiling()
        and bool(getattr(module, "is_causal", False) if causal is None else causal)
        and all(options.get(name) is None for name in OTHERWISE)
        and not (options.get("dropout") or options.get("output_attentions"))
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] == value.shape[3]
        and query.shape[2] == key.shape[2] >= LONG
        and not (query.shape[0] == 1 and _ASKED.packed(options.get("position_ids")))
    )


class _Packed:
    """Whether a row holds several samples: asked once for all layers, since the answer waits for the GPU."""

    def __init__(self) -> None:
        self.seen, self.version, self.answer = Seen(), -1, False

    def packed(self, position_ids: torch.Tensor | None) -> bool:
        if position_ids is None:
            return False
        version = -1 if position_ids.is_inference() else position_ids._version  # made in inference mode, none counts
        if version < 0 or version != self.version or not self.seen.is_(position_ids):
            self.answer = bool((position_ids.diff() != 1).any())
            self.seen.set(position_ids)
            self.version = version
        return self.answer


_ASKED = _Packed()
