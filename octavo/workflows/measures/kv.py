"""Attention of one token to a KV cache in FP8 and in 16 bit, against torch's own in BF16.

8 key heads of 128 values, 4 query heads each: Llama-3.1-8B. The gate: every kind of cache against plain torch on the
decoded values, with windows, masks and the length on the device; the same bits twice; what is written, bit for bit.
Times: medians of CUDA graphs over caches larger than the L2 cache in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from octavo.base.errors import OctavoError
from octavo.formats.measure import sqnr_db
from octavo.modules.kv_storage import Granularity, KVStorage
from octavo.ops.attention import CachedKV, append, attend
from octavo.workflows.measures.timing import graph_milliseconds

HEADS, GROUP, HEAD = 8, 4, 128
KINDS = ("tensor", "token-head", "16bit")
TORCH = "torch bf16"
FLUSH_BYTES = 256 << 20
FLOOR_DB = 49.0  # weights and result in bfloat16, each one rounding
SHAPES = ((128, 4, 1), (128, 4, 1000), (128, 1, 8192), (64, 3, 777), (64, 16, 333), (96, 8, 130))  # head, group, tokens


def check(device: str, shapes: Iterable[tuple[int, int, int]] = SHAPES) -> dict[str, float]:
    """Kind of cache -> the least dB of all cases. OctavoError under the floor."""
    worst = dict.fromkeys(KINDS, float("inf"))
    for kind, (head, group, tokens) in itertools.product(KINDS, shapes):
        kv, q = _made(kind, 2, 3, tokens, head, device), _values(2, 3 * group, head, seed=9, device=device)
        mask = torch.rand(2, tokens, device=device) < 0.7
        mask[:, -1] = True
        length = torch.tensor([tokens - 1], dtype=torch.int32, device=device)
        for window, seen, ahead in itertools.product((0, 100), (None, mask), (tokens, 1)):
            first = max(0, tokens - window) if window else 0
            call = partial(attend, q, kv, HEAD**-0.5, ahead, length=None if ahead == tokens else length)
            found = call(mask=seen, window=window)
            db = sqnr_db(found, _plain(q, kv, first, tokens, seen))
            worst[kind] = min(worst[kind], db)
            again = torch.equal(found, call(mask=seen, window=window))
            if not (db > FLOOR_DB and again):
                case = f"{kind}, heads of {head}, groups of {group}, {tokens} tokens, window {window}"
                raise OctavoError(
                    f"gate of kv: {case}", got=f"{db:.1f} dB, the same twice: {again}", need=f"{FLOOR_DB} dB"
                )
        _check_writing(kind, device)
    return worst


def rows(
    device: str,
    tokens: Iterable[int] = (1024, 8192, 32768, 131072),
    batches: Iterable[int] = (1, 8),
    names: Iterable[str] = (*KINDS, TORCH),
) -> Iterator[dict[str, Any]]:
    """us, TB/s of the cache's bytes, and the speed-up over the last of the names, case by case."""
    for batch, count in itertools.product(batches, tokens):
        q = _values(batch, HEADS * GROUP, HEAD, seed=0, device=device)
        length = torch.tensor([count - 1], dtype=torch.int32, device=device)
        found: list[dict[str, Any]] = []
        for name in names:
            kind = "16bit" if name == TORCH else name
            one = _made(kind, batch, HEADS, count, HEAD, device)
            size = sum(part.nbytes for part in (one.keys, one.values, one.k_scale, one.v_scale) if part is not None)
            others = range(2, max(3, 2 * (FLUSH_BYTES // size)), 2)
            caches = [one, *(_made(kind, batch, HEADS, count, HEAD, device, seed) for seed in others)]
            ours = partial(attend, scaling=HEAD**-0.5, tokens=1, length=length)
            call = _torch if name == TORCH else ours
            took = graph_milliseconds([partial(call, q, kv) for kv in caches], rounds=20)
            row = {"what": name, "batch": batch, "tokens": count, "us": round(took * 1e3, 1), "bytes": size}
            found.append(row | {"tb_s": round(size / took / 1e9, 2)})
        for row in found:
            yield row | {"speedup": round(found[-1]["us"] / row["us"], 2)}


def _values(*shape: int, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def _made(kind: str, batch: int, heads: int, tokens: int, head: int, device: str, seed: int = 0) -> CachedKV:
    storage = KVStorage(cast(Granularity, kind), (0.02, 0.015), tokens)
    k, v = (_values(batch, heads, tokens, head, seed=seed + i, device=device) for i in range(2))
    return storage.append(k, v)


def _plain(q: torch.Tensor, kv: CachedKV, first: int, last: int, mask: torch.Tensor | None) -> torch.Tensor:
    keys, held = (x.double() for x in kv.between(first, last).decoded(torch.float32))
    seen = None if mask is None else mask[:, None, None, first:last]
    wide = q.double()[:, :, None]
    return F.scaled_dot_product_attention(wide, keys, held, seen, scale=HEAD**-0.5, enable_gqa=True)[:, :, 0]


def _torch(q: torch.Tensor, kv: CachedKV) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[:, :, None], kv.keys, kv.values, enable_gqa=True)[:, :, 0]


def _check_writing(kind: str, device: str) -> None:
    """A transposed view, written on the device and on the CPU."""
    k = _values(2, 3, 50, 128, seed=3, device=device) * 40
    v = _values(2, 50, 3, 128, seed=4, device=device).transpose(1, 2)
    here, there = _made(kind, 2, 3, 64, 128, device), _made(kind, 2, 3, 64, 128, device)
    there = CachedKV(*(None if x is None else x.cpu() for x in vars(there).values()))  # type: ignore[arg-type]
    append(here, k, v, 7)
    append(there, k.cpu(), v.cpu(), 7)
    for name, x in vars(here).items():
        if x is not None and not torch.equal(x.cpu(), getattr(there, name)):
            raise OctavoError(f"gate of kv: {kind}, {name} as written", got="other bits than on the CPU")
