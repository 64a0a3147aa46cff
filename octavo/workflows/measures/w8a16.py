"""FP8 weights times 16-bit inputs against BF16 weights in torch, on the linears of Llama-3.1-8B.

The check: every product against float64 over the decoded weight. Times: medians of CUDA graphs over copies of the
weight in turn, larger together than the L2 cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from octavo.base.errors import OctavoError
from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.measure import sqnr_db
from octavo.formats.reference import dequantize_ref
from octavo.formats.rule import Rule
from octavo.ops.linear import linear
from octavo.ops.quantize import quantize
from octavo.workflows.measures.timing import graph_milliseconds

SHAPES = ((28672, 4096), (4096, 14336), (4096, 4096))
FLUSH_BYTES = 256 << 20
FLOOR_DB = 49.0  # weight and result rounded to bfloat16, as where a weight is decoded for one product


def rows(
    device: str,
    tokens: Iterable[int] = (1, 4, 16, 64, 256, 2048, 4096),
    shapes: Iterable[tuple[int, int]] = SHAPES,
) -> Iterator[dict[str, Any]]:
    """us, the speed-up over torch.mm in BF16, TB/s of the codes and dB. OctavoError under FLOOR_DB."""
    generator = torch.Generator(device).manual_seed(0)
    for n, k in shapes:
        w = torch.randn(n, k, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
        copies = max(2, FLUSH_BYTES // w.nbytes)
        wide = [w.clone() for _ in range(copies)]
        inputs = [torch.randn(m, k, generator=generator, device=device, dtype=torch.bfloat16) for m in tokens]
        base = [graph_milliseconds([partial(torch.mm, x, copy.mT) for copy in wide], rounds=20) for x in inputs]
        for granularity, (x, plain) in itertools.product(
            (PerRow(), PerBlock(128, 128)), zip(inputs, base, strict=True)
        ):
            weights = [quantize(w, Rule(granularity=granularity)) for _ in range(2 * copies)]
            db = sqnr_db(linear(x, weights[0]), x.double() @ dequantize_ref(weights[0]).double().mT)
            what = f"{granularity}, {len(x)} x {n} x {k}"
            if not db > FLOOR_DB:
                raise OctavoError(f"check of w8a16: {what}", got=f"{db:.1f} dB", need=f"{FLOOR_DB} dB")
            took = graph_milliseconds([partial(linear, x, q) for q in weights], rounds=20)
            row = {"what": str(granularity), "tokens": len(x), "n": n, "k": k, "us": round(took * 1e3, 2)}
            yield row | {"speedup": round(plain / took, 3), "tb_s": round(n * k / took / 1e9, 2), "db": round(db, 1)}
