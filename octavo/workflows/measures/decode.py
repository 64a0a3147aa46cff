"""Decoding an 8B Llama shape with random weights: tokens a second through `model.generate`, and where the time goes.

Rivals in the same run: Transformers' own loop in BF16, and BF16 weights with a BF16 cache in our loop and CUDA graph.
prefill_ms: of the prompt alone; in Transformers' loop of a prompt and two tokens.
The gate: logits of captured steps over forced tokens, against the model's own forward with the same kind of cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from octavo.base.errors import OctavoError
from octavo.formats.measure import sqnr_db
from octavo.integrations.decoding import Decoder
from octavo.integrations.float8_cache import Float8Cache
from octavo.integrations.measuring import cache_argument, new_cache
from octavo.integrations.shaped import random_model
from octavo.modules.kv_storage import STEP, Granularity
from octavo.ops.attention import attend
from octavo.ops.decode import Positions, gate, residual_norm, rotate_and_append
from octavo.workflows.measures.timing import graph_milliseconds, milliseconds

NEW = 256
SMALL_GPU, RESERVE = 24 << 30, 1 << 30  # bytes of an RTX 3090, and what of it is left for a step's own tensors
TRIES = 3
# name -> weights and KV cache; no cache: Transformers' own loop
VARIANTS: dict[str, tuple[str, Granularity | None]] = {
    "generate bf16": ("bf16", None),
    "graph bf16, kv bf16": ("bf16", "16bit"),
    "graph bf16, kv fp8": ("bf16", "token-head"),
    "generate fp8, kv fp8": ("fp8", None),
    "graph fp8, kv bf16": ("fp8", "16bit"),
    "graph fp8, kv fp8 tensor": ("fp8", "tensor"),
    "graph fp8, kv fp8": ("fp8", "token-head"),
}
# Two orders of sums in bfloat16 differ by a unit in the last place here and there, which 32 layers of random weights do
# not dampen (25.7 dB measured), and which moves codes of the cache that lie at the edge of another (20.8).
FLOOR_DB = {"16bit": 22.0, "token-head": 16.0, "tensor": 16.0}


def rows(
    config: Mapping[str, Any],
    device: str,
    only: Iterable[str] = VARIANTS,
    batches: Iterable[int] = (1, 8),
    prompts: Iterable[int] = (128, 2048),
    parts: bool = True,
) -> Iterator[dict[str, Any]]:
    """Case by case. config: of the model. OctavoError where the gate of a variant says no."""
    for weights in ("bf16", "fp8"):
        chosen = {name: VARIANTS[name][1] for name in only if VARIANTS[name][0] == weights}
        model = random_model(config, weights, device) if chosen else nn.Identity()
        size = sum(parameter.nbytes for parameter in model.parameters())
        for name, kv_cache in chosen.items():
            db = check(model, kv_cache, device) if kv_cache else None
            for batch in batches:
                for prompt in prompts:
                    _free()
                    row = {"what": name, "batch": batch, "prompt": prompt, "weights_gb": round(size / 1e9, 2), "db": db}
                    yield row | _measured(model, kv_cache, weights, batch, prompt, device)
            if kv_cache and parts:
                found = _parts(model, kv_cache, device)
                yield {"what": f"parts of {name}", "ms": found, "sum": round(sum(found.values()), 3)}
                yield {"what": f"tokens in 24 GiB, {name}"} | _context(model, kv_cache, size, device)
        del model
        _free()


def check(model: nn.Module, kv_cache: Granularity, device: str) -> float:
    """dB of the logits of 16 forced tokens through captured steps, and of a captured prompt before them."""
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, cast(Any, model).config.vocab_size, (1, 80), device=device, generator=generator)
    state = cast(Any, Decoder(model, capacity=128, kv_cache=kv_cache).warmup(prompt=64).state)
    found = [state.prefill(ids[:, :64], None).clone()]
    state.length.fill_(64)
    for place in range(64, 80):
        state.tokens.copy_(ids[:, place])
        state.advance()
        found.append(state.logits.clone())
    cache = new_cache(model) if kv_cache == "16bit" else Float8Cache(model, granularity=kv_cache)
    with torch.no_grad():
        want = cast(Any, model)(input_ids=ids, use_cache=True, **{cache_argument(model): cache}).logits[0, 63:]
    db = round(sqnr_db(torch.cat(found), want), 1)
    if not db > FLOOR_DB[kv_cache]:
        raise OctavoError(f"gate of decode, {kv_cache}", got=f"{db} dB", need=f"{FLOOR_DB[kv_cache]} dB")
    return db


def _measured(
    model: nn.Module, kv_cache: Granularity | None, weights: str, batch: int, prompt: int, device: str
) -> dict[str, Any]:
    ids = torch.randint(0, cast(Any, model).config.vocab_size, (batch, prompt), device=device)
    started = time.perf_counter()
    decoder = Decoder(model, capacity=prompt + NEW, kv_cache=kv_cache) if kv_cache else None
    if decoder is not None:
        decoder.warmup(batch, prompt=prompt)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"warmup_s": round(time.perf_counter() - started, 2)} if decoder else {}
    new = NEW if decoder is not None else NEW // 4

    def run(count: int) -> float:
        options: dict[str, Any] = {"custom_generate": decoder} if decoder is not None else {}
        if decoder is None and weights == "fp8":
            options = {cache_argument(model): Float8Cache(model)}
        begin = time.perf_counter()
        mask = torch.ones_like(ids)
        cast(Any, model).generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **options
        )
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    run(2)
    short, long = run(2), min(run(new) for _ in range(2))
    row |= {"tokens_s": round(batch * (new - 2) / (long - short), 1), "prefill_ms": round(short * 1e3, 1)}
    if decoder is not None:
        state = cast(Any, decoder.state)
        row["prefill_ms"] = round(milliseconds(lambda: state.prefill(ids, None), rounds=10), 2)
        state.length.fill_(prompt)
        row["step_ms"] = round(milliseconds(state.advance, rounds=40), 3)
        row["kv_bytes_a_token"] = sum(storage.nbytes for storage in state.storages) // (batch * (prompt + NEW))
    return row


def _parts(model: nn.Module, kv_cache: Granularity, device: str, tokens: int = 1024) -> dict[str, float]:
    """Milliseconds of a step at so many tokens by kind of work, each alone over all layers."""
    decoder = Decoder(model, capacity=tokens, kv_cache=kv_cache).warmup()
    step, layers = decoder.step, decoder.step.layers
    state = cast(Any, decoder.state)
    state.advance()
    caches, logits = [storage.kv for storage in state.storages], state.logits.clone()
    x = torch.randn(1, step.final.weight.numel(), device=device, dtype=step.dtype)
    length = torch.tensor([tokens - 1], dtype=torch.int32, device=device)
    qkv, gate_up, positions = layers[0].qkv(x), layers[0].gate_up(x), Positions(*step.tables)
    q = qkv[:, : step.heads * step.width].reshape(1, step.heads, step.width).contiguous()
    h = gate(gate_up, step.activation)
    calls: dict[str, list[Callable[[], object]]] = {
        "qkv": [partial(layer.qkv, x) for layer in layers],
        "o": [partial(layer.o, q.reshape(1, -1)) for layer in layers],
        "gate_up": [partial(layer.gate_up, x) for layer in layers],
        "down": [partial(layer.down, h) for layer in layers],
        "norms": [partial(residual_norm, x, x.clone(), step.final.weight, 1e-5) for _ in range(2 * len(layers))],
        "rotate_store": [partial(rotate_and_append, qkv, kv, step.heads, positions, length) for kv in caches],
        "attention": [partial(attend, q, kv, 0.09, 1, length=length) for kv in caches],
        "gate": [partial(gate, gate_up, step.activation) for _ in layers],
        "head": [partial(step.head, x)],
        "next token": [lambda: state.take(state.most_likely(logits))],
    }
    return {name: round(graph_milliseconds(some, rounds=20) * len(some), 4) for name, some in calls.items()}


def _context(model: nn.Module, kv_cache: Granularity, weights: int, device: str) -> dict[str, Any]:
    """How many tokens a cache holds beside the weights, tried: steps at its end, no more memory than SMALL_GPU."""
    a_token, whole = _bytes_a_token(Decoder(model, capacity=STEP, kv_cache=kv_cache, graph=False).warmup())
    room = SMALL_GPU - RESERVE - weights
    for _ in range(TRIES):
        capacity = int(room // whole) // STEP * STEP
        if capacity < STEP:
            return {"tokens": 0, "bytes_a_token": a_token}
        _free()
        torch.cuda.reset_peak_memory_stats()
        state = cast(Any, Decoder(model, capacity=capacity, kv_cache=kv_cache).warmup().state)
        state.length.fill_(capacity - 2)
        state.advance()
        torch.cuda.synchronize()
        peak, finite = torch.cuda.max_memory_allocated(), bool(torch.isfinite(state.logits).all())
        if peak <= SMALL_GPU:
            sizes = {"bytes_a_token": a_token, "peak_gib": round(peak / 2**30, 2)}
            return {"tokens": capacity, **sizes, "finite": finite}
        room = capacity * whole - (peak - SMALL_GPU)
        del state
    fix = "What a step takes beside its cache grew while it was measured: end other work in this process."
    raise OctavoError(f"a cache of {capacity} tokens", got=f"{peak / 2**30:.2f} GiB", need="24 GiB", fix=fix)


def _bytes_a_token(decoder: Decoder) -> tuple[int, int]:
    """Of the caches, and of all that is made for a capacity."""
    state, capacity = cast(Any, decoder.state), decoder.capacity
    caches = sum(storage.nbytes for storage in state.storages)
    rest = sum(buffer.nbytes for buffer in (state.mask, state.history, *decoder.step.tables))
    return caches // capacity, -(-(caches + rest) // capacity)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
