"""`octavo bench kv` with sizes of your own, and offsets beyond 2^31: a line a case, then JSON.

python benchmarks/kv.py [--tokens 1024,8192,32768,131072] [--batches 1,8] [--no-overlap] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.base.errors import UnsupportedError
from octavo.base.hardware import caps_of
from octavo.kernels import splits
from octavo.kernels.cuda import loader
from octavo.ops import attention
from octavo.ops.attention import CachedKV, attend
from octavo.workflows.bench import machine
from octavo.workflows.measures import kv


def far() -> str:
    """Offsets beyond 2^31: the last row of a cache of 2.3 GB of keys."""
    shape = 17, 8, 131072, 128
    wide = CachedKV(
        *(torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(2)),
        *torch.tensor([0.02, 0.015], device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    small = kv._made("tensor", 1, 8, 500, 128, "cuda")
    wide.keys[16, :, -500:], wide.values[16, :, -500:] = small.keys[0], small.values[0]
    q = kv._values(17, 32, 128, seed=9, device="cuda")
    found = attend(q, wide, 128**-0.5, 131072, window=500)
    db = kv.sqnr_db(found[16:], kv._plain(q[16:], small, 0, 500, None))
    assert db > kv.FLOOR_DB, f"offsets beyond 2^31: {db:.1f} dB"
    return f"{db:.1f} dB"


BLOCKS = [splits.AttentionBlock(warps, tiles, 2) for warps, tiles in ((4, 1), (4, 2), (8, 1), (2, 2), (2, 1), (8, 2))]


def sweep(tokens: list[int], batches: list[int]) -> list[dict[str, object]]:
    """Every block that compiles, and how many there are, by the sum of its times over all sizes."""
    found: list[dict[str, object]] = []
    for kind, block in itertools.product(kv.KINDS[:2], compiled()):
        for count in (2, 3, 4, 6):
            taken = attention.block_of
            tried = replace(block, resident=count)
            attention.block_of = lambda *_, tried=tried: tried
            times = [row["us"] for row in kv.rows("cuda", tokens, batches, [kind])]
            attention.block_of = taken
            found.append({"what": kind, "warps": block.warps, "tiles": block.tiles, "blocks": count, "us": times})
    for row in sorted(found, key=lambda row: (row["what"], sum(row["us"]))):
        print("  ".join(f"{value!s:>10}" for value in row.values()), flush=True)
    return found


def compiled() -> list[splits.AttentionBlock]:
    """Those that fit the registers; several are compiled at once."""
    loader.warm_up(attention.attention_variants(128, torch.bfloat16, 0), torch.device("cuda"))
    sm = torch.cuda.get_device_capability()

    def fits(block: splits.AttentionBlock) -> bool:
        shape = {"X_BF16": 1, "HEAD": 128, "WARPS": block.warps, "TILES": block.tiles}
        try:
            for kind in (0, 1):
                loader.load(loader.Variant("attention.cu", (*shape.items(), ("KV", kind))), sm)
        except UnsupportedError:
            return False
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [block for block, fitting in zip(BLOCKS, pool.map(fits, BLOCKS), strict=True) if fitting]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,8192,32768,131072")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sweep", action="store_true", help="blocks of the first phase, and how many")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    attention.OVERLAP = args.overlap
    report: dict[str, object] = {"machine": machine(str(caps_of("cuda")))}
    report |= {"checked": kv.check("cuda"), "far": far()}
    print(json.dumps(report), flush=True)
    rows = []
    sizes = [[int(size) for size in text.split(",")] for text in (args.tokens, args.batches)]
    for row in kv.rows("cuda", *sizes):
        print("  ".join(f"{value!s:>12}" for value in row.values()), flush=True)
        rows.append(row)
    report["rows"] = rows
    if args.sweep:
        report["sweep"] = sweep(*sizes)
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
