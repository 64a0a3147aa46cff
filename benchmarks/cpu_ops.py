"""The CPU backend: what an FP8 weight costs beside a float32 one, and how fast casts are. JSON lines.

    python benchmarks/cpu_ops.py [--threads 2] [--rounds 7]

Plain and FP8 take turns; a turn is a pass over 24 layers, so that a weight has left the cache when it comes round
again, as in a model. CPU time of the calling thread with --threads 1 (for a busy machine), wall clock else; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.formats.granularity import Granularity, PerBlock, PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.ops.linear import linear
from octavo.ops.quantize import dequantize, quantize

SHAPES = ((1536, 576), (576, 1536), (576, 576), (192, 576))  # SmolLM2-135M: up and gate, down, q and o, k and v
LAYERS = 24


def alternate(calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each call, one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if step:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def linear_case(n: int, k: int, tokens: int, granularity: Granularity, rounds: int, clock: Callable[[], float]) -> dict:
    weights = [torch.randn(n, k) for _ in range(LAYERS)]
    quantized = [quantize(w, Rule(granularity=granularity)) for w in weights]
    x, grad = torch.randn(tokens, k, requires_grad=True), torch.randn(tokens, n)
    calls = {
        "float32": lambda: [F.linear(x, w).backward(grad) for w in weights],
        "fp8": lambda: [linear(x, q).backward(grad) for q in quantized],
        "fp8_token": lambda: [linear(x, q, activation="token").backward(grad) for q in quantized],
    }
    times = {name: seconds / LAYERS for name, seconds in alternate(calls, rounds, clock).items()}
    row = {"case": f"linear {n}x{k} forward+backward", "tokens": tokens, "granularity": str(granularity)}
    row |= {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in times.items()}
    return row | {"overhead": round(times["fp8"] / times["float32"] - 1, 3)}


def cast_case(granularity: Granularity, rounds: int, clock: Callable[[], float]) -> dict:
    x = torch.randn(2048, 4096).bfloat16()
    q = quantize(x, Rule(granularity=granularity))
    calls = {
        "quantize": lambda: quantize(x, q_rule),
        "dequantize": lambda: dequantize(q),
        "torch_float8_to_float32": lambda: q.as_float8().float(),
    }
    q_rule = Rule(granularity=granularity)
    times = alternate(calls, rounds, clock)
    row = {"case": "casts 2048x4096 bfloat16", "granularity": str(granularity)}
    return row | {f"{name}_gelem_s": round(x.numel() / 1e9 / seconds, 3) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    for granularity in (PerRow(), PerBlock(128, 128)):
        for n, k in SHAPES:
            print(json.dumps(linear_case(n, k, args.tokens, granularity, args.rounds, clock)), flush=True)
    for granularity in (PerTensor(), PerRow(), PerBlock(128, 128)):
        print(json.dumps(cast_case(granularity, args.rounds, clock)), flush=True)


if __name__ == "__main__":
    main()
