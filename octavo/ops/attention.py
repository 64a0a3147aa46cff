"""Attention of new tokens to a cache of keys and values in FP8 or 16 bit, and how they get into it.

Every function has two forms with the same result: CUDA kernels that read the cache as it lies, and plain torch, which
decodes it first: the oracle, and what runs on a CPU or where a kernel does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from octavo.base.hardware import HardwareCaps, caps_of
from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.kernels.splits import (
    HEADS_AT_ONCE,
    MOST_SPLITS,
    WIDEST_16_BIT,
    WIDEST_HEAD,
    AttentionBlock,
    attention_block,
    most_splits,
)
from octavo.ops.backends import Problem, refuse_kernels
from octavo.ops.quantize import dequantize, quantize

STORE_THREADS = 128
DECODED_AT_ONCE = 1 << 26  # 16-bit values of keys, of as many heads as that takes
LAYER, TOKEN_HEAD, SIXTEEN_BIT = 0, 1, 2  # what `KV` is to the kernels
OVERLAP = True  # kernels of a step may be set up before the one before has ended


@dataclass(frozen=True)
class CachedKV:
    """Keys and values of one layer, room for `capacity` tokens.

    keys, values: [B, H, capacity, D], E4M3 codes as uint8, or 16 bit. k_scale, v_scale: float32 [], one for the layer,
    or [B, H, capacity], one for each token and head; nans: int32 [1], 1 once a NaN was written. None with 16 bit. Views
    along the tokens are fine.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    nans: torch.Tensor | None = None

    @property
    def kind(self) -> int:
        if self.k_scale is None:
            return SIXTEEN_BIT
        return TOKEN_HEAD if self.k_scale.dim() else LAYER

    @property
    def head(self) -> int:
        return self.keys.shape[-1]

    def between(self, first: int, last: int) -> CachedKV:
        """Tokens [first, last): views."""
        parts = {name: getattr(self, name)[:, :, first:last] for name in ("keys", "values")}
        if self.kind == TOKEN_HEAD:
            parts |= {name: getattr(self, name)[:, :, first:last] for name in ("k_scale", "v_scale")}
        return replace(self, **parts)

    def heads(self, first: int, last: int) -> CachedKV:
        """Key heads [first, last): views."""
        parts = {name: getattr(self, name)[:, first:last] for name in ("keys", "values")}
        if self.kind == TOKEN_HEAD:
            parts |= {name: getattr(self, name)[:, first:last] for name in ("k_scale", "v_scale")}
        return replace(self, **parts)

    def decoded(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `dtype`: code * scale in float32, rounded once."""
        return decoded(self.keys, self.k_scale, dtype), decoded(self.values, self.v_scale, dtype)


def decoded(codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """One side of a CachedKV."""
    if scale is None:
        return codes.to(dtype)
    granularity = PerRow() if scale.dim() else PerTensor()
    rows = codes.reshape(-1, codes.shape[-1]).contiguous()
    q = ScaledTensor(rows, scale.reshape(-1, 1) if scale.dim() else scale, E4M3, granularity)
    return dequantize(q, dtype).view(codes.shape)


def why_not(head: int, device: torch.device, dtype: torch.dtype, kind: int = LAYER) -> str | None:
    """What keeps the kernels from a cache with heads of this width, or None."""
    return refused(head, dtype, kind, caps_of(device))


def refused(head: int, dtype: torch.dtype, kind: int, caps: HardwareCaps) -> str | None:
    """`why_not`, for a device that need not be here."""
    reasons = refuse_kernels(Problem("attention", "cuda" if caps.is_cuda else "cpu", dtype), caps, (8, 0))
    widest = WIDEST_16_BIT if kind == SIXTEEN_BIT else WIDEST_HEAD
    if head % 32 or head > widest:
        reasons.append(f"heads of a multiple of 32 values, {widest} at most, not {head}")
    return "; ".join(reasons) or None


def append(kv: CachedKV, k: torch.Tensor, v: torch.Tensor, at: int = 0, *, length: torch.Tensor | None = None) -> None:
    """Write keys and values [B, H, n, D], 16 bit or wider, to the places `at` + length and after, in place.

    length: int32 [1] on the device, added to `at`: what a captured graph finds anew at each replay.
    """
    if not k.numel():
        return
    if on_kernels(k) and k.dtype in (torch.float16, torch.bfloat16) and k.shape == v.shape and not k.shape[3] % 2:
        store(kv, k, v, at, length)
        return
    begin = at + (int(length) if length is not None else 0)
    place = slice(begin, begin + k.shape[2])
    if kv.nans is not None:
        kv.nans.logical_or_(k.isnan().any() | v.isnan().any())
    for x, codes, scale in ((k, kv.keys, kv.k_scale), (v, kv.values, kv.v_scale)):
        if scale is None:
            codes[:, :, place] = x
        elif scale.dim():
            q = quantize(x, Rule(granularity=PerRow()))
            codes[:, :, place], scale[:, :, place] = q.codes, q.scale[..., 0]
        else:
            codes[:, :, place] = quantize(x, Rule(granularity=PerTensor()), scale=scale).codes


def attend(
    q: torch.Tensor,
    kv: CachedKV,
    scaling: float,
    tokens: int = 0,
    *,
    length: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """q [B, Hq, D], one token a row, attends to tokens [0, tokens + length) of the cache -> [B, Hq, D].

    softmax(q k^T * scaling) v with float32 sums. Hq is a multiple of the cache's H. length: as in `append`. mask: bool
    or uint8 [B, capacity or more], zero for what a row must not see. window: only the last so many tokens. A row that
    sees nothing gets zeros.
    """
    if on_kernels(q) and why_not(kv.head, q.device, q.dtype, kv.kind) is None:
        return split_attention(q, kv, scaling, tokens, length, mask, window)
    last = tokens + (int(length) if length is not None else 0)
    first = max(0, last - window) if window else 0
    if last <= first:
        return torch.zeros_like(q)
    keys, values = kv.between(first, last).decoded(q.dtype)
    seen = mask[:, None, None, first:last].bool() if mask is not None else None
    y = F.scaled_dot_product_attention(q[:, :, None], keys, values, seen, scale=scaling, enable_gqa=True)[:, :, 0]
    return y if seen is None else torch.where(seen.any(-1), y, torch.zeros_like(y))


def attend_prompt(
    q: torch.Tensor, kv: CachedKV, scaling: float, begin: int, *, mask: torch.Tensor | None = None, window: int = 0
) -> torch.Tensor:
    """q [B, n, Hq, D], tokens at places begin to begin + n, whose keys and values are in the cache -> [B, n, Hq, D].

    Each attends to those before it and to itself, by torch's own attention over the decoded cache, a few key heads at a
    time. mask, window: as in `attend`; a token that a mask hides sees itself.
    """
    n, last, heads = q.shape[1], begin + q.shape[1], kv.keys.shape[1]
    first = max(0, begin + 1 - window) if window else 0
    group, bias = q.shape[2] // heads, _causal(n, last - first, window, mask, first, q.device)
    at_once = max(1, min(heads, DECODED_AT_ONCE // max(1, len(q) * (last - first) * kv.head)))
    found = []
    for head in range(0, heads, at_once):
        end = min(heads, head + at_once)
        keys, values = kv.between(first, last).heads(head, end).decoded(q.dtype)
        some = q[:, :, head * group : end * group].transpose(1, 2)
        y = F.scaled_dot_product_attention(some, keys, values, bias, scale=scaling, enable_gqa=True)
        found.append(y.transpose(1, 2))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _causal(
    n: int, seen: int, window: int, mask: torch.Tensor | None, first: int, device: torch.device
) -> torch.Tensor:
    """What n tokens, the last of `seen` from place `first` on, attend to."""
    if mask is None and (not window or seen <= window):
        return cast(torch.Tensor, causal_lower_right(n, seen))
    token = torch.arange(seen - n, seen, device=device)[:, None]
    place = torch.arange(seen, device=device)
    allowed = place <= token
    if window:
        allowed &= place > token - window
    if mask is None:
        return allowed
    return (allowed & mask[:, None, None, first : first + seen].bool()) | (place == token)


def on_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda


def store(
    kv: CachedKV,
    k: torch.Tensor,
    v: torch.Tensor,
    at: int,
    length: torch.Tensor | None,
    rotary: Rotary | None = None,
) -> None:
    """kv_store.cu. rotary: rotate k and the queries in it on the way."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    batch, heads, tokens, _ = k.shape
    defines = {
        "X_BF16": int(k.dtype == torch.bfloat16),
        "THREADS": STORE_THREADS,
        "HEAD": kv.head,
        "KV": kv.kind,
        "ROTARY": int(rotary is not None),
        "NORM": int(rotary is not None and rotary.q_norm is not None),
    }
    variant = loader.Variant("kv_store.cu", tuple(defines.items()))
    r = rotary or Rotary()
    q_heads = r.q.shape[2] if r.q is not None else 0
    units = q_heads + 2 * heads
    arguments = (
        *(r.q, k, v, r.out, kv.keys, kv.values, kv.k_scale, kv.v_scale, kv.nans),
        *(r.cosine, r.sine, r.q_norm, r.k_norm, length, r.padding),
        *(np.int32(at), np.int32(tokens), np.int32(q_heads), np.int32(heads), np.float32(r.epsilon)),
        *(np.int64(r.q.stride(i) if r.q is not None else 0) for i in range(2)),
        *(np.int64(stride) for x in (k, v) for stride in x.stride()[:3]),
        *(np.int64(stride) for stride in kv.keys.stride()[:2]),
    )
    grid = batch * tokens, -(-units // (STORE_THREADS // 32))
    loader.launch(variant, grid, STORE_THREADS, arguments, k, OVERLAP)


@dataclass(frozen=True)
class Rotary:
    """What kv_store.cu needs to rotate: queries q [B, n, Hq, D] and where they go, the tables [positions, D / 2] in the
    dtype of q, for Qwen3 the weights [D] of its norms, and int32 [B] tokens of padding before each row's first.
    """

    q: torch.Tensor | None = None
    out: torch.Tensor | None = None
    cosine: torch.Tensor | None = None
    sine: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    epsilon: float = 0.0
    padding: torch.Tensor | None = None


def split_attention(
    q: torch.Tensor,
    kv: CachedKV,
    scaling: float,
    tokens: int,
    length: torch.Tensor | None,
    mask: torch.Tensor | None,
    window: int,
) -> torch.Tensor:
    """attention.cu and attention_combine.cu."""
    q = q.contiguous()
    batch, q_heads, head = q.shape
    kv_heads = kv.keys.shape[1]
    group = q_heads // kv_heads
    rows = batch * kv_heads * -(-group // HEADS_AT_ONCE)
    block = block_of(head, kv.kind)
    # A length on the device may be any: the grid is for as many tokens as fit, and blocks without work return.
    longest = kv.keys.shape[2] if length is not None else max(1, tokens)
    splits = min(most_splits(rows, processors(q.device), block.resident), -(-longest // block.tokens))
    out = torch.empty_like(q)
    if not q.numel():
        return out
    partial = torch.empty((batch * q_heads, splits, head + 2), device=q.device)
    common = (np.int32(splits), np.int32(tokens), np.int32(window))
    arguments = (
        *(
            q,
            kv.keys,
            kv.values,
            kv.k_scale,
            kv.v_scale,
            kv.nans,
            mask,
            length,
            partial,
            np.int32(kv_heads),
            np.int32(group),
        ),
        *(np.int64(kv.keys.stride(0)), np.int64(kv.keys.stride(1))),
        np.int64(mask.stride(0) if mask is not None else 0),
        *common,
        np.float32(scaling),
    )
    first, second = attention_variants(head, q.dtype, kv.kind)
    loader.launch(first, (splits, rows), 32 * block.warps, arguments, q, OVERLAP)
    loader.launch(second, (batch * q_heads,), head, (partial, length, out, *common), q, OVERLAP)
    return out


def block_of(head: int, kind: int) -> AttentionBlock:
    """The block of attention.cu for a cache of this kind."""
    return attention_block(head, int(kind == TOKEN_HEAD), kind == SIXTEEN_BIT)


def attention_variants(head: int, dtype: torch.dtype, kind: int) -> tuple[loader.Variant, loader.Variant]:
    """The two phases for heads of this width."""
    bf16, block = int(dtype == torch.bfloat16), block_of(head, kind)
    shape = {"X_BF16": bf16, "HEAD": head, "WARPS": block.warps, "TILES": block.tiles, "KV": kind}
    combine = {"X_BF16": bf16, "HEAD": head, "BLOCK": block.tokens, "MOST": MOST_SPLITS}
    return (
        loader.Variant("attention.cu", tuple(shape.items())),
        loader.Variant("attention_combine.cu", tuple(combine.items())),
    )


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a number like a GPU's for the CPU, where kernels run in tests only."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
