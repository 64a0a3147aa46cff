"""Products of FP8 weights with 16-bit inputs on one GPU, against BF16 cuBLAS and other packages, in one run.

    python benchmarks/w8a16.py [--sweep [--kinds Ring]] [--shapes 28672x4096,...] [--tokens 1,4,16]
        [--scales row,block] [--rivals gemlite,torchao] [--out FILE]

First correctness (dB against float64 products of the decoded weights), then medians of CUDA graphs whose weights are
rotated past the L2 cache. BF16 has two speeds in one process, 15 % apart: each product takes turns with it, and the
speed-up is the median of the turns' ratios. --sweep times many plans instead of the one that plans.py takes, and prints
the fastest of each kind. --rivals: weight-only FP8 and INT8 of these packages, which are to be installed; measured
last, numbers of tokens in order. Every line is printed, and written to FILE as JSON, when it is known. OCTAVO_ARCH=80
runs the code path of an A100.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


from octavo.base.errors import UnsupportedError
from octavo.base.hardware import caps_of
from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.reference import dequantize_ref
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.kernels.cuda import loader
from octavo.kernels.plans import (
    Block,
    Gpu,
    Operands,
    Panels,
    Plan,
    Ring,
    TermBlock,
    Terms,
    Tokens,
    plan_dx,
    term_block,
)
from octavo.kernels.tiling import MAX_TOKENS
from octavo.ops import native, w8a16
from octavo.ops.graphs import capture
from octavo.ops.quantize import quantize
from octavo.testing import sqnr_db
from octavo.workflows.measures.timing import milliseconds

SHAPES = "28672x4096,4096x14336,4096x4096"
FLUSH_BYTES = 256 << 20  # weights of one graph: several times any L2 cache
FLOOR_DB = (
    50.0,
    48.0,
)  # a rounding to BF16 is 55.6 dB, the weight's as well 50.8 (docs/numerics.md); two terms have three
SHARED_BYTES = 227 << 10
ROUNDS = 30
Product = Callable[[torch.Tensor], torch.Tensor]
Row = dict[str, object]
BEST = 3  # of each kind of plan, in the table of a sweep


def few_token_plans(m: int, n: int, k: int) -> list[Plan]:
    """Tiles of w8a16_ring.cu that fit; two terms."""
    found: list[Plan] = term_blocks(m, n, k) if m > 1 else []
    shapes = itertools.product([(1, 1, 8), (1, 1, 16), (1, 2, 8), (2, 1, 8)], (2, 3, 4, 5, 6), (0, 1))
    for (tiles, warps_n, warps_k), depth, staged in shapes:
        ring = Ring(tiles, -(-m // 8), warps_n, warps_k, depth, staged)
        if ring.dynamic_bytes(m, k) <= SHARED_BYTES and (staged or m * k > 1 << 14):
            found.append(ring)
    return found


def term_blocks(m: int, n: int, k: int) -> list[Plan]:
    """The tile that plans.py takes, and its neighbours."""
    best = term_block(m, n, k, Operands(), Gpu((9, 0), loader.limits(torch.device("cuda"))[0], SHARED_BYTES))
    tiles = [(224, 64, 4), (224, 64, 5), (128, 64, 6)] if m <= 64 else [(224, 64, 4), (224, 128, 3), (128, 128, 4)]
    every = itertools.product(tiles, {1, best.splits})
    return [best, *(TermBlock(*tile, splits=splits) for tile, splits in every)]


def many_token_plans(m: int, n: int, k: int) -> list[Plan]:
    """Tiles of w8a16_tile.cu with parts of K for one or two waves of blocks; two terms; the decoded weight."""
    found: list[Plan] = [Terms(), Panels(1 << 31)]
    found += [Panels(size) for size in (2048, 8192) if size < n]
    found += term_blocks(m, n, k) if m <= 1024 else []
    shapes = [(2, 4, 4), (2, 8, 4), (2, 8, 7), (2, 8, 8), (1, 8, 8), (2, 16, 4), (2, 16, 7)]
    for (tiles_n, tiles_m, warps), depth in itertools.product(shapes if m <= 512 else [], (3, 4)):
        block = Block(tiles_n, tiles_m, warps, depth)
        blocks = math.prod(block.grid(m, n))
        room = max(1, SHARED_BYTES // block.dynamic_bytes(m, k)) * loader.limits(torch.device("cuda"))[0]
        splits = {1, max(1, room // blocks), max(1, 2 * room // blocks)}
        if block.dynamic_bytes(m, k) <= SHARED_BYTES:
            found += [replace(block, splits=s) for s in sorted(splits) if s <= min(16, -(-k // 128))]
    return found


class Against:
    """BF16, its weights in turn, to be timed beside what is measured."""

    def __init__(self, product: Product, wide: list[torch.Tensor]) -> None:
        self.graph, self.count = graph_of([partial(product, w) for w in wide]), len(wide)

    def times(self, calls: Sequence[Callable[[], object]]) -> tuple[float, float, float]:
        """Milliseconds of one call and of BF16, and BF16's over the call's: medians over turns."""
        graph, turns = graph_of(calls), []
        for _ in range(ROUNDS):
            base = milliseconds(self.graph.replay, 1) / self.count
            turns.append((milliseconds(graph.replay, 1) / len(calls), base))
        ratios = [base / took for took, base in turns]
        took, base = (statistics.median(times) for times in zip(*turns, strict=True))
        return took, base, statistics.median(ratios)


def bf16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w.mT)


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    def run() -> None:
        for call in calls:
            call()

    return capture(run, torch.device("cuda"), warm=1)


def compiled(plans: list[Plan], x: torch.Tensor, w: ScaledTensor) -> list[Plan]:
    """Those that fit the registers; several are compiled at once."""
    loader.nvrtc_version()
    sm = torch.cuda.get_device_capability(x.device)

    variants = {plan: w8a16.variant(plan, x.dtype, w, len(x)) for plan in plans if not isinstance(plan, Panels | Terms)}

    def fits(variant: loader.Variant) -> bool:
        try:
            return bool(loader.load(variant, sm))
        except UnsupportedError:
            return False

    different = list(set(variants.values()))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        fitting = dict(zip(different, pool.map(fits, different), strict=True))
    return [plan for plan in plans if plan not in variants or fitting[variants[plan]]]


def rivals(wide: list[torch.Tensor], copies: int, packages: list[str]) -> dict[str, list[Product]]:
    """name -> x @ w^T of packages that offer 8-bit weights with 16-bit inputs, so many copies of the weight each."""
    w, found = wide[0], {}

    def layers(quantized: Callable[[torch.nn.Linear], Product]) -> list[Product]:
        made = []
        for _ in range(copies):
            layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
            layer.weight.data.copy_(w)
            made.append(quantized(layer.requires_grad_(False)))
        return made

    if "gemlite" in packages:
        from gemlite import helper

        for name, kind in (("gemlite FP8", helper.A16W8_FP8), ("gemlite INT8", helper.A16W8_INT8)):
            make = kind(device=str(w.device), dtype=w.dtype)
            found[name] = layers(partial(make.from_linear, del_orig=False))
    if "torchao" in packages:
        from torchao import quantization

        torch._dynamo.config.recompile_limit = 1 << 10
        for name, config in (
            ("torchao FP8", quantization.Float8WeightOnlyConfig()),
            ("torchao INT8", quantization.Int8WeightOnlyConfig()),
        ):

            def compiled_layer(layer: torch.nn.Linear, config: object = config) -> Product:
                quantization.quantize_(layer, config)
                return torch.compile(layer, dynamic=False)

            found[name] = layers(compiled_layer)
    return found


def measure_rivals(packages: list[str], wide: list[torch.Tensor], copies: int, tokens: list[int]) -> Iterator[Row]:
    """Their rows; one that fails says so and is left out."""
    rule = Rule(granularity=PerRow())
    others = rivals(wide, copies, packages)
    for m, (name, calls) in itertools.product(tokens, others.items()):
        x = inputs(m, wide[0].shape[1])
        try:
            db = sqnr_db(calls[0](x), x.double() @ wide[0].double().mT)
            times = Against(partial(bf16, x), wide).times([partial(call, x) for call in calls])
        except Exception as error:  # another package's: a row less
            print(f"{name}, M={m}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        yield row(name, rule, m, *wide[0].shape, times, db, "of the weight before it was rounded")


def inputs(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(m), device="cuda", dtype=torch.bfloat16)


def run(n: int, k: int, args: argparse.Namespace) -> Iterator[Row]:
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02
    copies = max(2, FLUSH_BYTES // (n * k))
    wide = [w.clone() for _ in range(max(2, copies // 2))]
    for granularity in [{"row": PerRow(), "block": PerBlock(128, 128)}[name] for name in args.scales]:
        rule = Rule(granularity=granularity)
        weights = [quantize(w, rule) for _ in range(copies)]
        for m in args.tokens:
            yield from run_tokens(m, weights, wide, rule, args)
            if m > MAX_TOKENS and (not args.kinds or "Panels" in args.kinds):
                yield from run_dx(weights, wide, rule, m, args.sweep, generator)
    if args.rivals:
        yield from measure_rivals(args.rivals, wide, copies, args.tokens)


def run_tokens(
    m: int,
    weights: list[ScaledTensor],
    wide: list[torch.Tensor],
    rule: Rule,
    args: argparse.Namespace,
) -> Iterator[Row]:
    n, k = wide[0].shape
    x = inputs(m, k)
    exact = x.double() @ dequantize_ref(weights[0]).double().mT
    against = Against(partial(bf16, x), wide)
    plans, wrong = [w8a16.plan_for(x, weights[0])], 0
    if args.sweep:
        every = few_token_plans(m, n, k) if m <= MAX_TOKENS else many_token_plans(m, n, k)
        plans = compiled([p for p in every if not args.kinds or type(p).__name__ in args.kinds], x, weights[0])
        random.Random(0).shuffle(plans)  # so that whatever the time allows is a fair part
    began = time.monotonic()
    for i, plan in enumerate(plans):
        if time.monotonic() - began > args.seconds:
            print(f"M={m} {n}x{k}: {i} of {len(plans)} plans in {args.seconds} s", flush=True)
            break
        db = sqnr_db(w8a16.product(x, weights[0], None, plan), exact)
        if not db >= FLOOR_DB[isinstance(plan, Terms)]:
            wrong += 1
            print(f"WRONG: M={m} {n}x{k} {rule.granularity} {plan}: {db:.1f} dB", flush=True)
            if wrong > 3:
                raise SystemExit("more than three kernels are wrong")
            continue
        times = against.times([partial(w8a16.product, x, q, None, plan) for q in weights])
        yield row("octavo w8a16", rule, m, n, k, times, db, str(plan))


def run_dx(
    weights: list[ScaledTensor],
    wide: list[torch.Tensor],
    rule: Rule,
    m: int,
    sweep: bool,
    generator: torch.Generator,
) -> Iterator[Row]:
    n, k = wide[0].shape
    grad = torch.randn(m, n, generator=generator, device="cuda", dtype=torch.bfloat16)
    against = Against(partial(torch.mm, grad), wide)
    exact = grad.double() @ dequantize_ref(weights[0]).double()
    for plan in (
        [Panels(1 << 31), *(Panels(size) for size in (1024, 2048) if size < k)] if sweep else [plan_dx(m, k, Tokens())]
    ):
        db = sqnr_db(w8a16.product_dx(grad, weights[0], plan), exact)
        times = against.times([partial(w8a16.product_dx, grad, q, plan) for q in weights])
        yield row("octavo w8a16 dX", rule, m, n, k, times, db, str(plan))
    if isinstance(rule.granularity, PerRow):
        times = against.times([partial(native.linear_dx, grad, q) for q in weights])
        yield row("octavo native dX", rule, m, n, k, times, sqnr_db(native.linear_dx(grad, weights[0]), exact), "")


def table(rows: list[Row]) -> None:
    """The fastest of each kind of plan, per shape and number of tokens."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for r in rows:
        kind = str(r["note"]).split("(")[0]
        kinds.setdefault((r["scales"], r["n"], r["k"], r["m"], r["what"], kind), []).append(r)
    for group in kinds.values():
        for r in sorted(group, key=lambda r: r["us"])[:BEST]:  # type: ignore[arg-type, return-value]
            print(line(r), flush=True)


def row(name: str, rule: Rule, m: int, n: int, k: int, times: tuple[float, float, float], db: float, note: str) -> Row:
    took, base, speedup = times
    return {
        "what": name,
        "scales": str(rule.granularity),
        "m": m,
        "n": n,
        "k": k,
        "us": round(took * 1e3, 2),
        "bf16_us": round(base * 1e3, 2),
        "speedup": round(speedup, 3),
        "tb_s": round(n * k / took / 1e9, 3),
        "db": round(db, 1),
        "note": note,
    }


def line(r: Row) -> str:
    size = f"{r['n']}x{r['k']} M={r['m']}"
    figures = f"{r['us']:>8} us (BF16 {r['bf16_us']:>7}) {r['speedup']:>6} x {r['tb_s']:>6} TB/s {r['db']:>5} dB"
    return f"{r['what']:<16} {r['scales']:<12} {size:<19} {figures}  {r['note']}"


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", type=numbers, default="1,4,8,16,64,256,2048,4096,8192")
    parser.add_argument("--scales", type=names, default="row,block")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the plans of one shape and number of tokens")
    parser.add_argument("--kinds", type=names, default=[], help="of plans in a sweep, e.g. Ring")
    parser.add_argument("--rivals", type=names, default=[], help="gemlite, torchao")
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    gc.freeze()  # captures collect: what was imported need not be looked at each time
    print(f"torch {torch.__version__}, {caps_of('cuda')}; speed-up over BF16 torch.mm of the same run", flush=True)
    with args.out.open("w") as out:
        for shape in args.shapes.split(","):
            n, k = map(int, shape.split("x"))
            for _, group in itertools.groupby(run(n, k, args), lambda r: r["m"]):
                found = []
                for r in group:
                    out.write(json.dumps(r) + "\n")
                    out.flush()
                    if args.sweep:
                        found.append(r)
                    else:
                        print(line(r), flush=True)
                table(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
