"""Every kernel of backend w8a16 on a CUDA device, whatever tiling.py takes, against float64 products.

    python benchmarks/w8a16_check.py [--small]
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python benchmarks/w8a16_check.py --small

--small: one problem of each kind. Exit code 1 where a result is wrong. OCTAVO_ARCH=80 runs the code path of an A100.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import octavo
from octavo import E4M3, E5M2, PerBlock, PerRow, PerTensor, Rule
from octavo.base.env import env
from octavo.base.hardware import caps_of
from octavo.formats.reference import dequantize_ref
from octavo.kernels.cuda import loader
from octavo.kernels.plans import Block, Operands, Panels, Plan, Ring, TermBlock, Terms, takes_terms
from octavo.ops import w8a16
from octavo.ops.backends import gpu_of
from octavo.ops.graphs import capture
from octavo.testing import FLOOR_DB, assert_sqnr

DEVICE = "cuda"
FEW_TOKENS = [
    Ring(1, 1, 1, 8, 3),
    Ring(1, 2, 1, 16, 4),
    Ring(2, 2, 2, 4, 2, staged=0),
    Ring(1, 1, 2, 8, 3),
    Ring(2, 1, 1, 8, 3, staged=0),
]
MANY_TOKENS = [
    Block(2, 4, 7, 3),
    Block(2, 8, 8, 3, splits=3),
    Block(2, 16, 4, 2),
    Block(4, 8, 4, 2),
    Panels(256),
]


def plans(m: int, dtype: torch.dtype, q: octavo.ScaledTensor) -> list[Plan]:
    """What takes m tokens of this dtype and a weight like q."""
    block, e4m3, (n, k) = isinstance(q.granularity, PerBlock), q.spec == E4M3, q.shape
    gpu, operands = gpu_of(torch.device(DEVICE)), Operands(dtype == torch.bfloat16, e4m3, 2 if block else 1)
    found: list[Plan] = [plan for plan in FEW_TOKENS if m <= plan.tokens and plan.dynamic_bytes(m, k) <= gpu.shared]
    for plan in MANY_TOKENS:
        registers = isinstance(plan, Block) and plan.tiles_n * plan.tiles_m <= (16 if block else 32)
        if registers or (isinstance(plan, Panels) and e4m3):
            found.append(plan)
    if operands.bf16 and e4m3 and gpu.sm == (9, 0):
        found += [TermBlock(128, 128, 4, 1), TermBlock(128, short=1, splits=2)]
        found += [] if block else [TermBlock(), TermBlock(224, 128, 3, 8)]
    return found + ([Terms()] if takes_terms(n, k, operands, gpu) else [])


def one_product(m: int, n: int, k: int, q: octavo.ScaledTensor, dtype: torch.dtype) -> int:
    x, bias = torch.randn(m, k + 8, device=DEVICE, dtype=dtype)[:, :k], torch.randn(n, device=DEVICE, dtype=dtype)
    want = x.double() @ dequantize_ref(q).double().mT + bias.double()
    floor = FLOOR_DB["dequant", "bfloat16" if dtype == torch.bfloat16 else "float16"] - 2
    found = plans(m, dtype, q)
    variants = [w8a16.variant(plan, dtype, q, m) for plan in found if not isinstance(plan, Panels | Terms)]
    loader.warm_up(variants, torch.device(DEVICE))
    for plan in found:
        y = w8a16.product(x, q, bias, plan)
        assert_sqnr(y, want, 47.0 if plan == Terms() else floor, f"{q.granularity} {dtype} {m} {n}x{k} {plan}")
    return len(found)


def many_problems() -> str:
    count = 0
    for spec, granularity, dtype in itertools.product(
        (E4M3, E5M2), (PerTensor(), PerRow(), PerBlock(128, 128)), (torch.bfloat16, torch.float16)
    ):
        for m, n, k in ((1, 200, 144), (13, 576, 1536), (16, 4100, 2064), (300, 1000, 1040), (50, 256, 384)):
            q = octavo.quantize(torch.randn(n, k, device=DEVICE) * 0.1, Rule(spec, granularity))
            count += one_product(m, n, k, q, dtype)
    return f"{count} products"


def one_of_each() -> str:
    for granularity, m in itertools.product((PerRow(), PerBlock(128, 128)), (13, 36)):
        q = octavo.quantize(torch.randn(256, 384, device=DEVICE) * 0.1, Rule(granularity=granularity))
        one_product(m, 256, 384, q, torch.bfloat16)
    return "one problem of each kind"


def early_starts() -> str:
    """Kernels that start before the one before has ended, the bits of those that wait."""
    layers = [octavo.quantize(torch.randn(1024, 1024, device=DEVICE) / 32, Rule()) for _ in range(20)]
    x, ends = torch.randn(1, 1024, device=DEVICE, dtype=torch.bfloat16), []
    for overlap in (0, 1, 1):
        y = x
        for q in layers:
            y = w8a16.product(y, q, None, Ring(1, 1, 1, 8, 4, overlap=overlap))
        ends.append(y)
    assert all(torch.equal(end, ends[0]) for end in ends) and torch.isfinite(y).all()
    return "early starts change no bit"


def fresh_codes() -> str:
    """Codes that the kernel right before wrote, over others, in a graph: no early kernel reads the others."""
    plans: list[Plan] = [Ring(1, 1, 1, 8, 2)]
    plans += [TermBlock()] if gpu_of(torch.device(DEVICE)).sm == (9, 0) else []
    x = torch.randn(8, 2048, device=DEVICE, dtype=torch.bfloat16)
    layers = [octavo.quantize(torch.randn(4096, 2048, device=DEVICE), Rule()) for _ in range(10)]
    held = layers[0].codes.clone()
    for plan in plans:
        want, found = [w8a16.product(x, q, None, plan) for q in layers], [torch.empty(0)] * len(layers)

        def run(plan: Plan = plan, found: list[torch.Tensor] = found) -> None:
            for i, q in enumerate(layers):
                held.copy_(q.codes)
                found[i] = w8a16.product(x, replace(q, codes=held), None, plan)

        capture(run, torch.device(DEVICE), warm=1).replay()
        assert all(torch.equal(y, z) for y, z in zip(found, want, strict=True)), str(plan)
    return "codes just written are read"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {caps_of(DEVICE)}, OCTAVO_ARCH={env().arch}", flush=True)
    wrong = 0
    for check in (one_of_each if args.small else many_problems, early_starts, fresh_codes):
        try:
            print(f"ok    {check()}", flush=True)
        except Exception as error:
            wrong = 1
            print(f"WRONG {check.__name__}: {type(error).__name__}: {error}", flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
