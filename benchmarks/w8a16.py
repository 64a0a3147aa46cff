"""Products of FP8 weights with 16-bit inputs on one GPU, against BF16 cuBLAS and other packages, in one run.

    python benchmarks/w8a16.py [--sweep] [--shapes 28672x4096,...] [--tokens 1,4,16] [--out FILE]

First correctness (dB against float64 products of the decoded weights), then medians of CUDA graphs whose weights are
rotated past the L2 cache. --sweep times every tile of w8a16.cu instead of the one that tiling.py would take. gemlite
joins where it is installed. OCTAVO_ARCH=80 runs the code path of an A100.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import graph_milliseconds

from octavo.base.errors import UnsupportedError
from octavo.base.hardware import caps_of
from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.recipe import Rule
from octavo.formats.reference import dequantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import MAX_TOKENS, Tile, w8a16_tile
from octavo.ops import native, w8a16
from octavo.ops.quantize import quantize
from octavo.testing import sqnr_db

SHAPES = "28672x4096,4096x14336,4096x4096"
FLUSH_BYTES = 256 << 20  # weights of one graph: several times any L2 cache
FLOOR_DB = 50.0  # one rounding to BF16 is 55.6, a weight rounded to BF16 as well 50.8 (docs/numerics.md)
TILES = [
    Tile(tiles_n, tiles_m, warps_n, warps_k, depth)
    for tiles_n, tiles_m, (warps_n, warps_k), depth in itertools.product(
        (1, 2, 4), (1, 2), ((1, 2), (1, 4), (2, 2), (4, 1), (2, 4), (1, 8), (4, 4), (1, 16)), (1, 2, 4)
    )
    if tiles_n * depth <= 4  # registers
]


def milliseconds(call: Callable[[ScaledTensor], object], weights: list[ScaledTensor]) -> float:
    """The median time of one call, the copies of the weight in turn."""
    return graph_milliseconds([partial(call, w) for w in weights], rounds=30)


def with_tile(tile: Tile) -> Callable[..., torch.Tensor]:
    def linear(*args: object) -> torch.Tensor:
        taken, w8a16.w8a16_tile = w8a16.w8a16_tile, lambda m, n, k: tile
        try:
            return w8a16.linear(*args)
        finally:
            w8a16.w8a16_tile = taken

    return linear


def compiled(tiles: list[Tile | None], x: torch.Tensor, w: ScaledTensor) -> list[Tile | None]:
    """Those that fit the registers; several are compiled at once."""
    loader.nvrtc_version()
    sm = torch.cuda.get_device_capability(x.device)

    def fits(tile: Tile | None) -> bool:
        try:
            return tile is not None and bool(loader.load(w8a16.few_tokens(tile, x.dtype, w), sm))
        except UnsupportedError:
            return False

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [tile for tile, fitting in zip(tiles, pool.map(fits, tiles), strict=True) if fitting]


def rivals(w: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """name -> x @ w^T of packages that offer FP8 weights with 16-bit inputs, on a copy of w each."""
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
    layer.weight.data.copy_(w)
    try:
        from gemlite.helper import A16W8_FP8

        found["gemlite"] = A16W8_FP8(device=str(w.device), dtype=w.dtype).from_linear(layer, del_orig=False)
    except ImportError:
        pass
    return found


def run(n: int, k: int, tokens: list[int], sweep: bool) -> list[dict[str, object]]:
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02
    copies = max(2, FLUSH_BYTES // (n * k))
    wide = [w.clone() for _ in range(max(2, copies // 2))]
    rows = []
    for granularity in (PerRow(),) if sweep else (PerRow(), PerBlock(128, 128)):
        rule = Rule(granularity=granularity)
        weights = [quantize(w, rule) for _ in range(copies)]
        others = rivals(w) if isinstance(rule.granularity, PerRow) else {}
        for m in tokens:
            x = torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
            exact = x.double() @ dequantize_ref(weights[0]).double().mT
            base = milliseconds(lambda copy, x=x: torch.mm(x, copy.mT), wide)
            fitting = [tile for tile in TILES if m > 8 * (tile.tiles_m - 1)]
            tiles = fitting if sweep and m <= MAX_TOKENS else [w8a16_tile(m, n, k)]
            if len(tiles) > 1:
                tiles = compiled(tiles, x, weights[0])
            for tile in tiles:
                ours = with_tile(tile) if tile else w8a16.linear
                db = sqnr_db(ours(x, weights[0], None, "none", None), exact)
                assert db > FLOOR_DB, f"M={m} {n}x{k} {rule.granularity} {tile}: {db:.1f} dB"
                took = milliseconds(lambda q, x=x, ours=ours: ours(x, q, None, "none", None), weights)
                rows.append(row("octavo w8a16", rule, m, n, k, took, base, db, str(tile)))
            for name, call in others.items():
                took = milliseconds(lambda _, x=x, call=call: call(x), weights)  # one copy: it may stay in L2
                rows.append(row(name, rule, m, n, k, took, base, sqnr_db(call(x), exact), "one copy"))
            grad = torch.randn(m, n, generator=generator, device="cuda", dtype=torch.bfloat16)
            if m > MAX_TOKENS:
                back = milliseconds(lambda copy, grad=grad: torch.mm(grad, copy), wide)
                exact_dx = grad.double() @ dequantize_ref(weights[0]).double()
                for name, op in (("octavo w8a16 dX", w8a16.linear_dx), ("octavo native dX", native.linear_dx)):
                    if op is native.linear_dx and not isinstance(rule.granularity, PerRow):
                        continue
                    db = sqnr_db(op(grad, weights[0]), exact_dx)
                    took = milliseconds(lambda q, grad=grad, op=op: op(grad, q), weights)
                    rows.append(row(name, rule, m, n, k, took, back, db, ""))
    return rows


def row(
    name: str, rule: Rule, m: int, n: int, k: int, took: float, base: float, db: float, note: str
) -> dict[str, object]:
    found = {
        "what": name,
        "scales": str(rule.granularity),
        "m": m,
        "n": n,
        "k": k,
        "us": round(took * 1e3, 2),
        "speedup": round(base / took, 3),
        "tb_s": round(n * k / took / 1e9, 3),
        "db": round(db, 1),
        "note": note,
    }
    print("  ".join(f"{value!s:>14}" for value in found.values()), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,4,8,16,64,256,2048,4096,8192")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {caps_of('cuda')}; speed-up over BF16 torch.mm of the same run", flush=True)
    tokens = [int(m) for m in args.tokens.split(",")]
    rows = []
    for shape in args.shapes.split(","):
        n, k = map(int, shape.split("x"))
        rows += run(n, k, tokens, args.sweep)
    report = {"torch": torch.__version__, "device": str(caps_of("cuda")), "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
