"""Calibration and compensated rounding of Llama-3.1-8B-shaped random weights, block by block, on one GPU.

    python benchmarks/rounding_8b.py [--layers N] [--windows 16] [--scheme channel|block128] [--sequential]
    python benchmarks/rounding_8b.py --device cpu --tiny        the same code on a small shape

Weights wait in host memory in BF16, as a checkpoint would; making them is not counted. Claim: at most 4 minutes, and
the device never holds more than one block with what rounding it needs (peak memory does not grow with --layers). First
the column kernel against its oracle on one matrix: equal codes, but where a float32 sum differs in its last bit.
JSON lines; stderr says what each block took, and every 30 s where the program is. `--layers 2` sees it run, in seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.formats.granularity import PerRow
from octavo.formats.recipe import Recipe
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rounding import Curvature, EagerColumns, compensated
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3
from octavo.integrations.blocks import BlockMoments, BlockWalk, Groups
from octavo.integrations.moments import watched_groups
from octavo.modules.moments import MomentSums
from octavo.ops.columns import columns_for
from octavo.ops.rounding import Compensator

MINUTES = 4
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
CONTEXT = 512
DIFFER = 0.05  # of the codes, at most: where a float32 sum differs in its last bit, all that follows in its row may


def build(shape: dict[str, int], layers: int, device: torch.device) -> torch.nn.Module:
    """Random weights, BF16, in host memory; drawn on the device, where that is fast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, num_hidden_layers=layers, attn_implementation="sdpa", tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            drawn = drawn.fill_(1.0) if drawn.dim() == 1 else drawn.normal_(std=0.02, generator=generator)
            setattr(module, name, torch.nn.Parameter(drawn.cpu(), requires_grad=False))
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    return model.eval()


class Clock:
    """Seconds by part, in which the device does what it was given."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.parts = device, dict[str, float]()
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.parts.items())


def kernel(device: torch.device, n: int, k: int) -> Iterator[dict[str, Any]]:
    """The device's column loop against EagerColumns, one matrix, correlated inputs."""
    generator = torch.Generator(device).manual_seed(1)
    mix = torch.randn(k, k, device=device, generator=generator) / k**0.5
    x = torch.randn(2 * k, k, device=device, generator=generator) @ mix
    weight = torch.randn(n, k, device=device, generator=generator) * 0.02
    curvature, scale = Curvature.of(x.mT @ x), quantize_ref(weight, E4M3, PerRow()).scale
    found, seconds = {}, {}
    for name, columns in (("eager", EagerColumns()), ("chosen", columns_for(device))):
        compensated(weight, curvature, scale, PerRow(), E4M3, columns=columns)
        clock = Clock(device)
        found[name] = compensated(weight, curvature, scale, PerRow(), E4M3, columns=columns)
        clock.lap(name)
        seconds |= clock.parts
    differ = float((found["eager"].codes != found["chosen"].codes).float().mean())
    error = float(found["chosen"].error.sum() / found["eager"].error.sum())
    yield {
        "part": "column kernel",
        "shape": [n, k],
        "columns": type(columns_for(device)).__name__,
        "codes_differ": differ,
        "error_to_eager": error,
        "milliseconds": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "expected": {"codes_differ": f"<= {DIFFER}", "error_to_eager": "0.999 to 1.001"},
        "agrees": differ <= DIFFER and abs(error - 1) <= 1e-3,
    }


def job(arguments: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    started = time.perf_counter()
    model = build(TINY if arguments.tiny else LLAMA_8B, arguments.layers, device)
    print(f"weights made in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(2)
    samples = [torch.randint(vocabulary, (CONTEXT,), generator=generator) for _ in range(arguments.windows)]
    rule: Rule = Recipe.named(arguments.scheme, rounding="compensated").rule
    modules = dict(model.named_modules())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = Clock(device)
    solved = {"error": 0.0, "nearest": 0.0, "values": 0}

    def visit(groups: Groups, seen: MomentSums) -> None:
        clock.lap("moments")
        solve = Compensator(BlockMoments(groups, seen.matrices))
        for names in groups.values():
            for name in names:
                weight = modules[name].weight
                q = solve(weight.data, rule, None, name)
                q.codes.cpu()
                solved["values"] += q.codes.numel()
                if arguments.sequential:
                    weight.data.copy_(dequantize_ref(q))
        solved["error"] += solve.error
        solved["nearest"] += solve.error_nearest
        clock.lap("rounding")
        print(f"{next(iter(groups))}: {clock}", file=sys.stderr, flush=True)

    walk = BlockWalk(model, samples, watched_groups(model), device)
    clock.lap("capture")
    if arguments.sequential:
        weights = walk.token_weights(lambda amount: None)
        clock.lap("fisher")
        walk.moments(weights, visit, lambda amount: None, sequential=True)
    else:
        walk.fisher_moments(visit, lambda amount: None)
    clock.lap("moments")
    seconds = sum(clock.parts.values())
    block = sum(p.numel() * 2 for p in next(iter(walk.blocks.values())).parameters())
    whole = not arguments.tiny and arguments.layers == 32 and device.type == "cuda"
    yield {
        "part": "calibrate and round",
        "layers": arguments.layers,
        "scheme": arguments.scheme,
        "sequential": arguments.sequential,
        "windows": arguments.windows,
        "values": solved["values"],
        "seconds": round(seconds, 1),
        "seconds_of": {name: round(value, 1) for name, value in clock.parts.items()},
        "output_error": solved["error"] / solved["nearest"],
        "block_gib": block / 2**30,
        "model_gib": sum(p.numel() * 2 for p in model.parameters()) / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "expected": {"seconds": f"<= {60 * MINUTES}"},
        "agrees": seconds <= 60 * MINUTES if whole else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens, to calibrate on")
    parser.add_argument("--scheme", default="channel")
    parser.add_argument("--sequential", action="store_true", help="each block sees the rounded ones before it")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that everything runs")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    stamp = {"torch": torch.__version__, "device": arguments.device}
    if device.type == "cuda":
        stamp["device"] = torch.cuda.get_device_name(device)
    faulthandler.dump_traceback_later(30, repeat=True)
    failed = False
    sizes = (96, 160) if arguments.tiny else (1024, 4096)
    for lines in (kernel(device, *sizes), job(arguments, device)):
        for line in lines:
            print(json.dumps({"claim": "rounding_8b", **line, **stamp}), flush=True)
            failed |= line["agrees"] is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
