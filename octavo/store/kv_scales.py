"""Scales of an FP8 KV cache in a checkpoint: the tensors and the declaration, as vLLM and SGLang read them.

    ct       `ATTENTION.k_scale`, `ATTENTION.v_scale`, [1], and `kv_cache_scheme` in config.json: FP8 by default
    native   the same names, scalars; its config has no word for it: the engine needs --kv-cache-dtype fp8
Latent attention (MLA): `ATTENTION.k_proj.k_scale`, the one spelling that vLLM looks up for it.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.base.errors import MismatchError
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint

KV_CACHES = ("16bit", "fp8")
KV_CACHE_SCHEME: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


def kv_scale_names(attention: str, latent: bool = False) -> tuple[str, str]:
    """Names of the k and v scale of an attention module, as files spell them."""
    if latent:
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"
    return f"{attention}.k_scale", f"{attention}.v_scale"


def kv_tensors(scales: Scales, source: Checkpoint, layout: str) -> dict[str, torch.Tensor]:
    """Name -> scale, float32 [1] or, in the native layout, []. MismatchError if the layers were not calibrated."""
    fix = "Calibrate this model: octavo calibrate MODEL --out scales.json"
    if not scales.kv:
        raise MismatchError("FP8 KV cache", got="scales.json without KV ranges", need="a range per layer", fix=fix)
    strange = [a for a in scales.kv if not any(name.startswith(f"{a}.") for name in source.names())]
    if strange:
        raise MismatchError("FP8 KV cache: scales of a layer that the model lacks", got=strange[0], fix=fix)
    shape = (1,) if layout == "ct" else ()
    latent = bool(source.text_config.get("kv_lora_rank"))
    found = {}
    for attention, kv in scales.kv.items():
        for name, value in zip(kv_scale_names(attention, latent), (kv.k_scale, kv.v_scale), strict=True):
            found[name] = torch.full(shape, value, dtype=torch.float32)
    return found


def stored_kv_scales(checkpoint: Checkpoint, attention: str) -> tuple[float, float] | None:
    """The k and v scale that a checkpoint holds for an attention module, or None where either is missing."""
    for latent in (False, True):
        names = kv_scale_names(attention, latent)
        if all(name in checkpoint for name in names):
            k, v = (float(checkpoint.get(name).float().reshape(-1)[0]) for name in names)
            return k, v
    return None
