"""Blocks for the row kernels on the shapes of a Llama-3.1-8B layer: each candidate checked and timed.

    python benchmarks/row_sweep.py [--only KERNEL ...] [--tokens 16384] [--out FILE]

A line a kernel and candidate: microseconds (median of CUDA graphs, data larger than the L2 cache), TB/s with every byte
counted once, and whether codes and scales are the reference's. `default` is what octavo.kernels.tiling says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import graph_milliseconds

from octavo import PerGroup, Rule
from octavo.base.errors import OctavoError
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.kernels.cuda import loader
from octavo.kernels.tiling import GroupBlock, RowBlock
from octavo.ops import fused, native

HIDDEN, KV, INNER = 4096, 1024, 14336
SAMPLE = 512  # rows that are compared with the reference
UNROLL, COLUMNS = ("UNROLL",), ("COLUMNS",)
TABLES = {native: ("row_block", "group_block"), fused: ("row_block", "gated_block")}


@dataclass(frozen=True)
class Case:
    """A kernel on its operands: what it computes from rows, and the blocks to try."""

    compute: Callable[[slice], tuple[torch.Tensor, ...]]  # of those rows, on whatever `fused.on_kernels` says
    nbytes: int
    exact: bool
    candidates: list[Any]


def rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16)


def parts_of(result: Any) -> tuple[torch.Tensor, ...]:
    """Codes, scales and plain tensors of whatever a function of `fused` returns."""
    if isinstance(result, ScaledTensor):
        return result.codes, result.scale
    if isinstance(result, tuple):
        return tuple(part for value in result if value is not None for part in parts_of(value))
    return (result,)


def cases(m: int) -> dict[str, Callable[[], Case]]:
    return {
        "gated": partial(gated, m),
        "gated_backward": partial(gated_backward, m),
        "norm": partial(norm, m),
        "norm_backward": partial(norm_backward, m, False),
        "norm_backward_codes": partial(norm_backward, m, True),
        "fold_14336": partial(fold, m, (INNER,)),
        "fold_6144": partial(fold, m, (HIDDEN, KV, KV)),
        "fold_4096": partial(fold, m, (HIDDEN,)),
        "plain_4096": partial(plain, m, HIDDEN),
        "group128_4096": partial(group128, m),
    }


def gated(m: int) -> Case:
    gate, up = rows(m, INNER), rows(m, INNER, 1)
    kept, held = (*UNROLL, "KEEP"), (*UNROLL, "KEEP", "HOLD")
    blocks = [RowBlock(512, 4, 1, 3), RowBlock(512, 4, 1, 3, UNROLL), RowBlock(256, 7, 1, 5), RowBlock(256, 7, 1, 6)]
    blocks += [RowBlock(384, 5, 1, 4), RowBlock(448, 4, 1, 2, UNROLL), RowBlock(448, 4, 1, 2, kept)]
    blocks += [RowBlock(896, 2, 2, 1, flags) for flags in (UNROLL, kept, held)]
    blocks += [RowBlock(448, 4, 2, 1, flags) for flags in (UNROLL, kept)]
    blocks += [RowBlock(608, 3, 2, 1, flags) for flags in (UNROLL, kept)]
    compute = lambda at: parts_of(fused.gated(gate[at], up[at], "silu"))  # noqa: E731
    return Case(compute, 7 * gate.numel(), False, blocks)


def gated_backward(m: int) -> Case:
    dh, columns = rows(m, INNER), torch.rand(2 * INNER, device="cuda")
    _, gate, up = fused.gated(rows(m, INNER, 1), rows(m, INNER, 2), "silu")
    blocks = [RowBlock(448, 4, 2, 1, (*UNROLL, *COLUMNS, "DECODE"))]
    blocks += [RowBlock(448, 4, 3, 1, UNROLL + COLUMNS), RowBlock(320, 6, 2, 1, UNROLL + COLUMNS)]
    blocks += [RowBlock(384, 5, 2, 1, UNROLL + COLUMNS), RowBlock(384, 5, 1, 4)]

    def compute(at: slice) -> tuple[torch.Tensor, ...]:
        g, u = (ScaledTensor(q.codes[at], q.scale[at], q.spec, q.granularity) for q in (gate, up))
        return parts_of(fused.gated_backward(dh[at], g, u, columns, "silu"))

    return Case(compute, 10 * dh.numel(), False, blocks)


def narrow() -> list[RowBlock]:
    """For rows of 4096."""
    sizes = ((128, 4, 2, 4), (128, 4, 3, 4), (256, 2, 2, 3), (256, 2, 3, 4))
    return [RowBlock(*size, COLUMNS) for size in sizes]


def norm(m: int) -> Case:
    x, weight = rows(m, HIDDEN), torch.rand(HIDDEN, device="cuda")
    compute = lambda at: parts_of(fused.quantize_tokens(x[at], columns=weight, epsilon=1e-5))  # noqa: E731
    return Case(compute, 3 * x.numel(), False, narrow())


def norm_backward(m: int, coded: bool) -> Case:
    dy, x, weight = rows(m, HIDDEN), rows(m, HIDDEN, 1), torch.rand(HIDDEN, device="cuda") + 0.1
    q, rstd = fused.quantize_tokens(x, columns=weight, epsilon=1e-5)

    def compute(at: slice) -> tuple[torch.Tensor, ...]:
        source = ScaledTensor(q.codes[at], q.scale[at], q.spec, q.granularity) if coded else x[at]
        return (fused.norm_backward(dy[at], source, weight, rstd[at]),)

    blocks = [RowBlock(128, 4), RowBlock(256, 2), RowBlock(512, 1)]
    return Case(compute, (5 if coded else 6) * x.numel(), False, blocks)


def fold(m: int, widths: tuple[int, ...]) -> Case:
    parts, columns = [rows(m, k, k) for k in widths], torch.rand(sum(widths), device="cuda")
    blocks = narrow()
    if sum(widths) == INNER:
        blocks = [RowBlock(448, 4, stages, 1, COLUMNS) for stages in (2, 3)] + [RowBlock(640, 3, 3, 1, COLUMNS)]
    elif sum(widths) > HIDDEN:
        blocks = [RowBlock(192, 4, 2, count, COLUMNS) for count in (2, 3)] + [RowBlock(256, 3, 3, 3, COLUMNS)]
    compute = lambda at: parts_of(fused.quantize_tokens(*(p[at] for p in parts), columns=columns))  # noqa: E731
    return Case(compute, 3 * sum(part.numel() for part in parts), True, blocks)


def plain(m: int, k: int) -> Case:
    x = rows(m, k)
    blocks = [RowBlock(128, 4, 1, 6), RowBlock(128, 4, 1, 8), RowBlock(256, 2, 1, 5), RowBlock(256, 2, 2, 5)]
    return Case(lambda at: parts_of(fused.quantize_tokens(x[at])), 3 * x.numel(), True, blocks)


def group128(m: int) -> Case:
    x, rule = rows(m, HIDDEN), Rule(E4M3, PerGroup(128))
    blocks = [GroupBlock(threads, count) for threads in (128, 256) for count in (1, 2, 4)]

    def compute(at: slice) -> tuple[torch.Tensor, ...]:
        if fused.on_kernels(x):
            return parts_of(native._quantize(x[at], rule, scale_by_columns=True))
        from octavo.formats.reference import quantize_ref

        return parts_of(quantize_ref(x[at], E4M3, PerGroup(128)))

    return Case(compute, 3 * x.numel(), True, blocks)


def agreement(case: Case) -> str:
    """`equal`, or how far the first rows are from the reference's: codes that differ, or decibels."""
    found = case.compute(slice(0, SAMPLE))
    with mock.patch.object(fused, "on_kernels", lambda x: False):
        want = case.compute(slice(0, SAMPLE))
    if all(torch.equal(a, b) for a, b in zip(found, want, strict=True)):
        return "equal"
    codes = [(a != b).float().mean().item() for a, b in zip(found, want, strict=True) if a.dtype == torch.uint8]
    wide = [(a.double(), b.double()) for a, b in zip(found, want, strict=True) if a.dtype != torch.uint8]
    error = max(((a - b).norm() / b.norm()).item() for a, b in wide)
    return f"{max(codes, default=0.0):.1e} codes, error {error:.1e}"


@contextmanager
def taking(block: Any) -> Iterator[None]:
    """Kernels take this block; None: what the tables say."""
    with ExitStack() as stack:
        for module, tables in TABLES.items():
            for table in tables if block is not None else ():
                stack.enter_context(mock.patch.object(module, table, lambda *args, **options: block))
        yield


def compile_all(names: list[str]) -> None:
    """Every candidate at once, on all cores; one that does not compile says so when it is measured."""
    variants: set[loader.Variant] = set()
    with mock.patch.object(loader, "launch", lambda variant, *_: variants.add(variant)):
        for name in names:
            case = cases(8)[name]()
            for block in (None, *case.candidates):
                with taking(block):
                    case.compute(slice(None))
    sm = torch.cuda.get_device_capability()
    loader.warm_up(list(variants)[:1], torch.device("cuda", 0))

    def attempt(variant: loader.Variant) -> None:
        with suppress(OctavoError):
            loader.load(variant, sm)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, variants))


def measure(name: str, case: Case, block: Any, out: list[dict[str, Any]]) -> None:
    label = "default" if block is None else " ".join(str(part) for part in vars(block).values() if part != ())
    try:
        with taking(block):
            agrees = agreement(case)
            took = 1e3 * graph_milliseconds([partial(case.compute, slice(None))] * 5, rounds=7)
        row = {"kernel": name, "block": label, "us": took, "tb_s": case.nbytes / took / 1e6, "agrees": agrees}
    except Exception as error:
        row = {"kernel": name, "block": label, "us": float("inf"), "tb_s": 0.0, "agrees": str(error)[:100]}
    out.append(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(cases(0)))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--show", type=int, default=5, help="best candidates of each kernel to print")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    compile_all(args.only)
    for name in args.only:
        case, mine = cases(args.tokens)[name](), []
        for block in (None, *case.candidates):
            measure(name, case, block, mine)
            if mine[0]["us"] == float("inf"):
                print(f"{name}: {mine[0]['agrees']}")
                return 1
        found += mine
        default, *rest = mine
        for row in (default, *sorted(rest, key=lambda row: row["us"])[: args.show]):
            print(
                f"{name:20} {row['block']:34} {row['us']:8.1f} us {row['tb_s']:6.2f} TB/s  {row['agrees']}", flush=True
            )
        failed = sum(row["us"] == float("inf") for row in mine)
        if failed:
            print(f"{name:20} {failed} candidates do not run", flush=True)
        del case
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text("".join(json.dumps(row) + "\n" for row in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
