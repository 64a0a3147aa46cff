"""Kernels of attention, decoding, rows and adapters at small sizes, against plain torch; w8a16_check.py has the rest.

    python benchmarks/kernel_check.py [--only NAME ...]
    compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/kernel_check.py

Run it once without the sanitizer, so that kernels are compiled. OCTAVO_ARCH=80 runs the code path of an A100.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpu_check import main

import octavo
from octavo import PerBlock, PerGroup, PerRow, PerTensor, Rule
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rounding import EagerColumns
from octavo.modules.kv_storage import Granularity, KVStorage
from octavo.ops import adapter_columns, adapter_gradients, attention, columns, decode, dropout, fused, groups, native
from octavo.testing import assert_sqnr
from octavo.workflows.measures import kv

HEADS = ((128, 9, 300), (64, 3, 33))  # width, queries to a key head, tokens


@contextmanager
def plain_torch() -> Iterator[None]:
    modules: tuple[Any, ...] = (attention, decode, fused)
    before = [module.on_kernels for module in modules]
    for module in modules:
        module.on_kernels = lambda x: False
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.on_kernels = function


def both(function: Callable[[], Any], floor: float = 40.0) -> float:
    """The least dB of a function's results on kernels against plain torch."""
    found = function()
    with plain_torch():
        want = function()
    pairs = zip(flat(found), flat(want), strict=True)
    return min(assert_sqnr(mine, theirs, floor) for mine, theirs in pairs if theirs.numel())


def flat(found: Any) -> list[torch.Tensor]:
    if isinstance(found, octavo.ScaledTensor):
        return [dequantize_ref(found)]
    if isinstance(found, attention.CachedKV):
        return list(found.decoded(torch.float32))
    return [found] if isinstance(found, torch.Tensor) else [x for part in found if part is not None for x in flat(part)]


def attention_and_cache(device: str) -> str:
    """Every kind of cache, with windows, masks, lengths on the device, splits; and what is written, bit for bit."""
    return ", ".join(f"{kind} {db:.1f} dB" for kind, db in kv.check(device, HEADS).items())


def steps_of_a_decoder(device: str) -> str:
    """residual_norm.cu, gate.cu and the rotary form of kv_store.cu."""
    worst = 999.0
    for dtype, (head, group, _) in itertools.product((torch.bfloat16, torch.float16), HEADS):
        make = partial(torch.randn, device=device, dtype=dtype)
        x, delta, weight = make(3, 2064), make(3, 2064), make(2064)
        worst = min(worst, both(partial(_normalized, delta, x, weight)))
        worst = min(worst, *(both(partial(decode.gate, x, activation)) for activation in fused.ACTIVATIONS))
        angle = torch.rand(40, head // 2, device=device) * 6
        positions = decode.Positions(angle.cos().to(dtype), angle.sin().to(dtype))
        norms = decode.HeadNorms(make(head), make(head), 1e-6)
        qkv, length = make(2, (2 * group + 4) * head), torch.tensor([9], dtype=torch.int32, device=device)
        for kind, used in itertools.product(("tensor", "token-head", "16bit"), (None, norms)):
            worst = min(worst, both(partial(_stored, kind, qkv, 2 * group, positions, length, used), 30.0))
    return f"worst {worst:.1f} dB"


def _normalized(delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    residual = residual.clone()
    return [decode.residual_norm(delta, residual, weight, 1e-6), residual]


def _stored(kind: Granularity, qkv: torch.Tensor, q_heads: int, positions: decode.Positions, *rest: Any) -> list[Any]:
    head = 2 * positions.cosine.shape[1]
    like = qkv.new_empty(2, 2, 0, head)
    cache = KVStorage(kind, (0.02, 0.015)).allocate(like, like, 16)
    return [decode.rotate_and_append(qkv, cache, q_heads, positions, *rest), cache]


def rows(device: str) -> str:
    """quantize.cu, cast.cu, norm.cu, gated.cu, transpose.cu, dequantize.cu, and their forms per group."""
    worst = 999.0
    for m, k in ((48, 272), (16, 2048)):
        x, y, z = (torch.randn(m, k, device=device, dtype=torch.bfloat16) * 2.0**i for i in (-3, 0, 3))
        scales, rstd = torch.rand(2 * k, device=device) + 0.1, torch.rand(m, device=device) + 0.5
        one, (_, gate, up) = scales[:k].contiguous(), fused.gated(x, y, "silu")
        calls: list[Callable[[], Any]] = [
            partial(fused.quantize_tokens, x, columns=one, epsilon=1e-5),
            partial(fused.quantize_tokens, x, y, columns=scales),
            partial(fused.norm_backward, x, y, one, rstd, z),
            partial(fused.gated, x, y, "silu"),
            partial(fused.gated_backward, z, gate, up, scales, "gelu_tanh"),
            partial(fused.transposed, gate.codes),
        ]
        rules = [Rule(granularity=PerTensor()), Rule(granularity=PerRow())]
        if k % 128 == 0:
            rules.append(Rule(granularity=PerGroup(128)))
            _, gate, up = groups.gated(x, y, "silu")
            calls += [
                partial(groups.quantize_tokens, x, columns=one, epsilon=1e-5),
                partial(groups.gated, x, y, "silu"),
                partial(groups.gated_backward, z, gate, up, None, "silu"),
            ]
        worst = min(worst, *(both(call) for call in calls))
        for rule in rules:
            found, want = native.quantize(z, None, rule), quantize_ref(z, rule.spec, rule.granularity)
            assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale), f"{rule}"
            if not isinstance(rule.granularity, PerGroup):
                assert torch.equal(fused.dequantize(found, x.dtype), dequantize_ref(want, x.dtype)), f"decoded {rule}"
    return f"worst {worst:.1f} dB"


def adapters(device: str) -> str:
    """downs.cu, ups.cu, append.cu, over_tokens.cu, per token and per group; low_gradients.cu, sum_parts.cu; dropout."""
    worst = 999.0
    for granularity in (PerRow(), PerBlock(128, 128)):
        m, n, k, rank = 36, 128, 512, 16
        x, w = torch.randn(m, k, device=device, dtype=torch.bfloat16), torch.randn(n, k, device=device) / 22
        q = octavo.quantize(w, Rule(granularity=granularity))
        a, b = torch.randn(rank, k, device=device) / 22, torch.randn(n, rank, device=device) / 4
        worst = min(worst, both(partial(_with_adapter, x, q, a, b)))
        dy, low = (torch.randn(m, size, device=device, dtype=x.dtype) for size in (n, rank))
        worst = min(worst, both(partial(_gradients, dy, low, b)))
    some = dropout.Dropout(2**61 + 7, 3277)
    left = torch.where(dropout.kept(n, k, some, q.codes.device), q.codes, 0)
    assert torch.equal(dropout.dropped_codes(q, some).codes, left)
    worst = min(worst, both(partial(_kept_added, dy, low, b.to(dy.dtype).mT, some)))
    return f"worst {worst:.1f} dB"


def _with_adapter(x: torch.Tensor, q: octavo.ScaledTensor, a: torch.Tensor, b: torch.Tensor) -> list[Any]:
    quantize = groups.quantize_tokens if isinstance(q.granularity, PerBlock) else fused.quantize_tokens
    downs = adapter_columns.encode_downs([a], [2.0])
    wide = adapter_columns.extended(q, b, 0, downs)
    forward, kept = adapter_columns.append_products(quantize(x, spare=downs.room)[0], downs, x.dtype)
    return [wide, forward, kept, adapter_gradients.over_tokens(kept, forward).sum(0)]


def _gradients(dy: torch.Tensor, low: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    into = torch.empty_like(low)
    return [adapter_gradients.over_output(dy, low, b, into), into]


def _kept_added(y: torch.Tensor, low: torch.Tensor, a: torch.Tensor, some: dropout.Dropout) -> torch.Tensor:
    y = y.clone()
    dropout.add_kept(y, low, a, some)
    return y


def column_loop(device: str) -> str:
    """round_columns.cu: the error it leaves is that of the loop in torch."""
    weight, scale = torch.randn(40, 128, device=device), torch.full((40, 128), 0.01, device=device)
    factor = torch.triu(torch.randn(128, 128, device=device) / 16, 1) + torch.eye(128, device=device)
    loops = columns.KernelColumns(), EagerColumns()
    found, want = (loop.compensate(weight, scale, factor, octavo.E4M3) for loop in loops)
    share = float((found[0] != want[0]).float().mean())
    assert share < 0.05, f"{share:.3f} of the codes differ"
    return f"{100 * share:.2f} % of the codes differ"


if __name__ == "__main__":
    raise SystemExit(main([attention_and_cache, steps_of_a_decoder, rows, adapters, column_loop], __doc__))
