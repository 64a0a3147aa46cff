"""Decoding an 8B Llama shape with random weights on a GPU: tokens a second, memory, and where a step's time goes.

    python benchmarks/decode.py [--layers 32] [--batches 1,8] [--prompts 128,8192] [--only NAME ...] [--out FILE]

All variants decode through `model.generate`. Rivals in the same run: Transformers' own loop in BF16, and BF16 weights
with a BF16 cache in our loop and CUDA graph. First the gate: logits of captured steps against the model's own forward
with the same kind of cache. Random weights have the speed of trained ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import graph_milliseconds

from octavo import Recipe, convert
from octavo.base.hardware import caps_of
from octavo.integrations.decoding import Decoder
from octavo.integrations.float8_cache import Float8Cache
from octavo.integrations.measuring import cache_argument
from octavo.ops import attention
from octavo.ops.attention import attend
from octavo.ops.decode import Positions, gate, residual_norm, rotate_and_append
from octavo.testing import sqnr_db
from octavo.workflows.planner.source import published

NEW = 256
# name: weights, KV cache ("" is Transformers' own loop), scheme of FP8 weights
VARIANTS = {
    "generate bf16": ("bf16", ""),
    "graph bf16, kv bf16": ("bf16", "16bit"),
    "graph bf16, kv fp8": ("bf16", "token-head"),
    "generate fp8, kv fp8": ("fp8", ""),
    "graph fp8, kv bf16": ("fp8", "16bit"),
    "graph fp8, kv fp8 tensor": ("fp8", "tensor"),
    "graph fp8, kv fp8, no overlap": ("fp8", "token-head"),
    "graph fp8, kv fp8": ("fp8", "token-head"),
}
FLOOR_DB = 25.0  # two orders of sums in bfloat16 through the whole model, which random weights do not dampen


def build(weights: str, layers: int) -> nn.Module:
    config = AutoConfig.for_model(**{**published()["llama-3.1-8b"], "num_hidden_layers": layers})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.requires_grad_(False)
    model.generation_config.eos_token_id = None
    if weights == "fp8":
        convert(model, Recipe.named("channel", activation="none"))
    return cast(nn.Module, model)


def check(model: nn.Module, kv_cache: str) -> float:
    """Forced tokens through captured steps and through the model; dB of the logits."""
    ids = torch.randint(0, 128000, (1, 80), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    decoder = Decoder(model, capacity=96, kv_cache=cast(Any, kv_cache)).warmup()
    state = cast(Any, decoder.state)
    state.prefill(ids[:, :64], None)
    state.length.fill_(64)
    found = []
    for place in range(64, 80):
        state.tokens.copy_(ids[:, place])
        state.advance()
        found.append(state.logits.clone())
    cache: Cache = Float8Cache(model, granularity=cast(Any, kv_cache)) if kv_cache != "16bit" else DynamicCache()
    with torch.no_grad():
        want = cast(Any, model)(input_ids=ids, use_cache=True, **{cache_argument(model): cache}).logits[0, 64:]
    db = sqnr_db(torch.cat(found), want)
    assert db > FLOOR_DB, f"{kv_cache}: {db:.1f} dB"
    return db


def measured(model: nn.Module, kv_cache: str, weights: str, batch: int, prompt: int) -> dict[str, Any]:
    ids = torch.randint(0, 128000, (batch, prompt), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    before = torch.cuda.memory_allocated()
    decoder = Decoder(model, capacity=prompt + NEW, kv_cache=cast(Any, kv_cache)) if kv_cache else None
    started = time.perf_counter()
    if decoder is not None:
        decoder.warmup(batch)
        torch.cuda.synchronize()
    row: dict[str, Any] = {"warmup_s": round(time.perf_counter() - started, 2)}
    new = NEW if decoder is not None else NEW // 4

    def run(count: int) -> float:
        options: dict[str, Any] = {"custom_generate": decoder} if decoder is not None else {}
        if decoder is None and weights == "fp8":
            options = {cache_argument(model): Float8Cache(model)}
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = cast(Any, model).generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=None,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        torch.cuda.synchronize()
        assert out.shape[1] == prompt + count, f"{out.shape[1]} tokens"
        return time.perf_counter() - begin

    run(2)
    short, long = run(2), min(run(new) for _ in range(2))
    row["tokens_s"] = round(batch * (new - 2) / (long - short), 1)
    row["prefill_ms"] = round(short * 1e3, 1)
    if decoder is not None:
        state = cast(Any, decoder.state)
        state.length.fill_(prompt)
        row["step_ms"] = round(graph_step(state), 3)
        row["kv_bytes"] = sum(storage.nbytes for storage in state.storages)
    row["added_gib"] = round((torch.cuda.memory_allocated() - before) / 2**30, 2)
    return row


def graph_step(state: Any) -> float:
    """Milliseconds of a replay, the median of 40."""
    found = []
    for _ in range(40):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        state.advance()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return sorted(found)[20]


def parts(model: nn.Module, kv_cache: str, batch: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a step by kind of work, each measured alone over all layers."""
    decoder = Decoder(model, capacity=tokens, kv_cache=cast(Any, kv_cache)).warmup(batch)
    state, step = cast(Any, decoder.state), decoder.step
    x = torch.randn(batch, step.final.weight.numel(), device="cuda", dtype=torch.bfloat16)
    length = torch.tensor([tokens - 1], dtype=torch.int32, device="cuda")
    layers, caches = step.layers, [storage.kv for storage in state.storages]
    qkv, gate_up = layers[0].qkv(x), layers[0].gate_up(x)
    q, h = qkv[:, : step.heads * step.width].reshape(batch, step.heads, step.width).contiguous(), gate(gate_up, "silu")
    positions = Positions(*step.tables)
    o = q.reshape(batch, -1)
    calls: dict[str, list[Callable[[], object]]] = {
        "qkv": [partial(layer.qkv, x) for layer in layers],
        "o": [partial(layer.o, o) for layer in layers],
        "gate_up": [partial(layer.gate_up, x) for layer in layers],
        "down": [partial(layer.down, h) for layer in layers],
        "norms": [partial(residual_norm, x, x.clone(), step.final.weight, 1e-5) for _ in range(2 * len(layers))],
        "rotate_store": [partial(rotate_and_append, qkv, kv, step.heads, positions, length) for kv in caches],
        "attention": [partial(attend, q, kv, 0.09, 1, length=length) for kv in caches],
        "gate": [partial(gate, gate_up, "silu") for _ in layers],
        "head": [partial(step.head, x)],
    }
    return {name: round(graph_milliseconds(some, rounds=20) * len(some), 4) for name, some in calls.items()}


def run_weights(weights: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = {n: kv for n, (w, kv) in VARIANTS.items() if w == weights and (not args.only or n in args.only)}
    if not chosen:
        return []
    gc.collect()
    torch.cuda.empty_cache()
    model = build(weights, args.layers)
    gc.collect()
    torch.cuda.empty_cache()
    size = sum(p.nbytes for p in model.parameters())
    rows = []
    for name, kv_cache in chosen.items():
        attention.OVERLAP = "no overlap" not in name
        db = check(model, kv_cache) if kv_cache else None
        for batch in map(int, args.batches.split(",")):
            for prompt in map(int, args.prompts.split(",")):
                row = {"what": name, "batch": batch, "prompt": prompt, "weights_gb": round(size / 1e9, 2), "db": db}
                row |= measured(model, kv_cache, weights, batch, prompt)
                print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
                rows.append(row)
                gc.collect()
                torch.cuda.empty_cache()
        if kv_cache and args.parts:
            found = parts(model, kv_cache, 1, 1024)
            rows.append({"what": f"parts of {name}, 1024 tokens", "ms": found, "sum": round(sum(found.values()), 3)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="128")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS))
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {caps_of('cuda')}", flush=True)
    rows = run_weights("bf16", args) + run_weights("fp8", args)
    report = {"torch": torch.__version__, "device": str(caps_of("cuda")), "layers": args.layers, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
