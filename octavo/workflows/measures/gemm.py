"""FP8 products as a training step takes them, against BF16 in torch: 16,384 tokens, linears of Llama-3.1-8B.

The check: 256 rows of every product against float64 over the same codes. Times: medians of CUDA graphs over two copies
of the operands; each is far larger than the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from octavo.base.errors import OctavoError
from octavo.formats.granularity import Granularity, PerBlock, PerGroup, PerRow
from octavo.formats.measure import sqnr_db
from octavo.formats.reference import dequantize_ref
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.ops.linear import linear
from octavo.ops.matmul import scaled_mm
from octavo.ops.quantize import quantize
from octavo.workflows.measures.timing import graph_milliseconds

TOKENS = 16384
SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))
FLOOR_DB = 38.0  # sums of E4M3 products that tensor cores keep in few bits (docs/numerics.md)
KINDS: dict[str, tuple[Granularity, str]] = {
    "row": (PerRow(), "token"),
    "block128x128": (PerBlock(128, 128), "group128"),
}


def rows(
    device: str, tokens: int = TOKENS, shapes: Iterable[tuple[int, int]] = SHAPES, kinds: Iterable[str] = KINDS
) -> Iterator[dict[str, Any]]:
    """TFLOP/s in BF16, of codes alone and with the inputs quantized, and the speed-up of the last; dB.

    OctavoError under FLOOR_DB.
    """
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    for n, k in shapes:
        w, inputs = make(n, k) * 0.02, [make(tokens, k) for _ in range(2)]
        work = 2e-9 * tokens * n * k
        plain = graph_milliseconds([partial(torch.mm, x, w.mT) for x in inputs], rounds=10)
        for kind in kinds:
            granularity, activation = KINDS[kind]
            q = quantize(w, Rule(granularity=granularity))
            coded = [quantize(x, _inputs(granularity)) for x in inputs]
            db = _check(coded[0], q, f"{kind}, {tokens} x {n} x {k}")
            alone = graph_milliseconds([partial(scaled_mm, a, q, torch.bfloat16) for a in coded], rounds=10)
            whole = graph_milliseconds([partial(linear, x, q, activation=activation) for x in inputs], rounds=10)
            rates = {"bf16": plain, "codes": alone, "with inputs": whole}
            row = {"what": kind, "tokens": tokens, "n": n, "k": k}
            row |= {f"{name} tflop_s": round(work / took) for name, took in rates.items()}
            yield row | {"speedup": round(plain / whole, 3), "db": round(db, 1)}


def _inputs(weights: Granularity) -> Rule:
    return Rule(granularity=PerGroup(128) if isinstance(weights, PerBlock) else PerRow())


def _check(a: ScaledTensor, q: ScaledTensor, what: str) -> float:
    found = scaled_mm(a, q, torch.bfloat16)[:256]
    some = ScaledTensor(a.codes[:256], a.scale[:256], a.spec, a.granularity)
    db = sqnr_db(found, dequantize_ref(some).double() @ dequantize_ref(q).double().mT)
    if not db > FLOOR_DB:
        raise OctavoError(f"check of gemm: {what}", got=f"{db:.1f} dB", need=f"{FLOOR_DB} dB")
    return db
