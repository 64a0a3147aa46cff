"""Attention of one token to a KV cache in FP8 and in 16 bit on a GPU, against torch's own; a line a case, then JSON.

    python benchmarks/kv.py [--tokens 1024,8192,32768,131072] [--batches 1,8] [--out FILE]

8 key heads of 128 values, 4 query heads each: Llama-3.1-8B. First the gate: every kind of cache against plain torch on
the decoded values, with windows, masks and lengths on the device, and the codes that are written, bit for bit. Then
medians of CUDA graphs over caches larger than the L2 cache in turn; the rival is BF16 scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import graph_milliseconds

from octavo.base.hardware import caps_of
from octavo.modules.kv_storage import KVStorage
from octavo.ops import attention
from octavo.ops.attention import CachedKV, append, attend
from octavo.testing import sqnr_db

HEADS, GROUP, HEAD = 8, 4, 128
KINDS = ("tensor", "token-head", "16bit")
FLUSH_BYTES = 256 << 20
FLOOR_DB = 49.0  # weights and result in bfloat16, each one rounding


def values(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype)


def made(kind: str, batch: int, heads: int, tokens: int, head: int, seed: int = 0) -> CachedKV:
    storage = KVStorage(kind, (0.02, 0.015), tokens)
    storage.append(values(batch, heads, tokens, head, seed=seed), values(batch, heads, tokens, head, seed=seed + 1))
    assert storage.kv is not None
    return storage.kv


def plain(q: torch.Tensor, kv: CachedKV, first: int, last: int, mask: torch.Tensor | None) -> torch.Tensor:
    keys, held = (x.double() for x in kv.between(first, last).decoded(torch.float32))
    seen = None if mask is None else mask[:, None, None, first:last]
    wide = q.double()[:, :, None]
    return F.scaled_dot_product_attention(wide, keys, held, seen, scale=HEAD**-0.5, enable_gqa=True)[:, :, 0]


def gate() -> dict[str, float]:
    """The least dB over all cases of a kind; AssertionError under the floor."""
    worst: dict[str, float] = {}
    for kind in KINDS:
        for head, group, tokens in (
            (128, 4, 1),
            (128, 4, 1000),
            (128, 1, 8192),
            (64, 3, 777),
            (64, 16, 333),
            (96, 8, 130),
        ):
            kv, q = made(kind, 2, 3, tokens, head), values(2, 3 * group, head, seed=9)
            mask = torch.rand(2, tokens, device="cuda") < 0.7
            mask[:, -1] = True
            length = torch.tensor([tokens - 1], dtype=torch.int32, device="cuda")
            for window in (0, 100):
                first = max(0, tokens - window) if window else 0
                for seen in (None, mask):
                    want = plain(q, kv, first, tokens, seen)
                    for options in ({"tokens": tokens}, {"tokens": 1, "length": length}):
                        found = attend(q, kv, HEAD**-0.5, mask=seen, window=window, **options)
                        db = sqnr_db(found, want)
                        assert db > FLOOR_DB, f"{kind} head {head} group {group} tokens {tokens} {window}: {db:.1f} dB"
                        worst[kind] = min(worst.get(kind, 999.0), db)
                        again = attend(q, kv, HEAD**-0.5, mask=seen, window=window, **options)
                        assert torch.equal(found, again), "not the same bits twice"
        k, v = values(2, 3, 50, 128, seed=3) * 40, values(2, 50, 3, 128, seed=4).transpose(1, 2)
        caches = [made(kind, 2, 3, 64, 128) for _ in range(2)]
        append(caches[0], k, v, 7)
        cpu = CachedKV(*(None if x is None else x.cpu() for x in vars(caches[1]).values()))
        append(cpu, k.cpu(), v.cpu(), 7)
        for name, x in vars(caches[0]).items():
            assert x is None or torch.equal(x.cpu(), getattr(cpu, name)), f"{kind}: {name} is not the bits of the CPU"
    return worst


def far() -> str:
    """Offsets beyond 2^31: the last row of a cache of 2.2 GB of keys."""
    kv = CachedKV(
        *(torch.zeros((17, 8, 131072, 128), dtype=torch.uint8, device="cuda") for _ in range(2)),
        *torch.tensor([0.02, 0.015], device="cuda"),
    )
    small = made("tensor", 1, 8, 500, 128)
    kv.keys[16, :, -500:], kv.values[16, :, -500:] = small.keys[0], small.values[0]
    q = values(17, 32, 128, seed=9)
    found = attend(q, kv, HEAD**-0.5, 131072, window=500)
    db = sqnr_db(found[16:], plain(q[16:], small, 0, 500, None))
    assert db > FLOOR_DB, f"offsets beyond 2^31: {db:.1f} dB"
    return f"{db:.1f} dB"


def sdpa(q: torch.Tensor, kv: CachedKV) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[:, :, None], kv.keys, kv.values, enable_gqa=True)[:, :, 0]


def times(batch: int, tokens: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    q = values(batch, HEADS * GROUP, HEAD, seed=0)
    for name in (*KINDS, "torch BF16"):
        kind = "16bit" if name == "torch BF16" else name
        one = made(kind, batch, HEADS, tokens, HEAD)
        size = one.keys.nbytes + one.values.nbytes + (2 * one.k_scale.nbytes if kind == "token-head" else 0)
        caches = [one] + [
            made(kind, batch, HEADS, tokens, HEAD, seed) for seed in range(1, max(2, FLUSH_BYTES // size))
        ]
        length = torch.tensor([tokens - 1], dtype=torch.int32, device="cuda")
        call = sdpa if name == "torch BF16" else partial(attend, scaling=HEAD**-0.5, tokens=1, length=length)
        took = graph_milliseconds([partial(call, q, kv) for kv in caches], rounds=20)
        rows.append(
            {"what": name, "batch": batch, "tokens": tokens, "us": round(took * 1e3, 1), "tb_s": size / took / 1e9}
        )
    for row in rows:
        row["speedup"] = round(float(rows[-1]["us"]) / float(row["us"]), 2)
        row["tb_s"] = round(float(row["tb_s"]), 2)
        print("  ".join(f"{value!s:>12}" for value in row.values()), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,8192,32768,131072")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    attention.OVERLAP = args.overlap
    print(f"torch {torch.__version__}, {caps_of('cuda')}", flush=True)
    assert attention.why_not(HEAD, torch.device("cuda"), torch.bfloat16) is None
    report = {"torch": torch.__version__, "device": str(caps_of("cuda")), "least_db": gate(), "far": far()}
    print("gate:", report["least_db"], "offsets beyond 2^31:", report["far"], flush=True)
    rows: list[dict[str, object]] = []
    for batch in map(int, args.batches.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            rows += times(batch, tokens)
            torch.cuda.empty_cache()
    report["rows"] = rows
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
