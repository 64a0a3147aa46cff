"""Every kernel of a fused LoRA step by itself, on the shapes of a Llama-3.1-8B layer: microseconds, bandwidth or rate.

    python benchmarks/fused_steps.py [--tokens 16384] [--only attention|head|rows|...] [--out FILE]

Medians of CUDA graphs; data larger than the L2 cache. Bytes are counted once each way; copy is the device's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))


from octavo import PerGroup, Rule
from octavo.formats.reference import quantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.ops import adapter_columns, adapter_gradients, fused, groups, native, w8a16
from octavo.workflows.measures.timing import graph_milliseconds

HIDDEN, INNER, HEADS = 4096, 14336, 1024
LARGE = ((8192, 8192, 8192), (16384, 6144, 4096), (16384, 28672, 4096), (16384, 4096, 14336))  # tokens, N, K
GROUP = Rule(E4M3, PerGroup(128))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    args = parser.parse_args()
    m, rows = args.tokens, []

    def show(name: str, call: Callable[[], object], *, nbytes: int = 0, flops: int = 0) -> None:
        try:
            took = 1e3 * graph_milliseconds([call] * 10, rounds=7)
        except Exception as error:
            print(f"{name:52} {type(error).__name__}: {str(error)[:80]}", flush=True)
            return
        rate = f"{nbytes / took / 1e6:7.2f} TB/s" if nbytes else f"{flops / took / 1e6:7.0f} TFLOP/s"
        rows.append({"name": name, "us": took, "bytes": nbytes, "flops": flops})
        print(f"{name:52} {took:9.1f} us  {rate}", flush=True)

    for name in args.only:
        PARTS[name](show, m)
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "tokens": m, "rows": rows}) + "\n")
    return 0


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def row_kernels(show: Callable[..., None], m: int) -> None:
    x, wide, other = normal(m, HIDDEN), normal(m, INNER), normal(m, INNER)
    keys = normal(m, HEADS)
    show("copy", lambda: x.clone(), nbytes=4 * x.numel())
    weight, columns = torch.rand(HIDDEN, device="cuda"), torch.rand(2 * INNER, device="cuda")
    one = columns[:INNER].contiguous()
    show("quantize tokens 4096", lambda: fused.quantize_tokens(x), nbytes=3 * x.numel())
    show("quantize tokens 14336", lambda: fused.quantize_tokens(wide), nbytes=3 * wide.numel())
    show("quantize, columns folded 14336", lambda: fused.quantize_tokens(wide, columns=one), nbytes=3 * wide.numel())
    three, folded = (x, keys, keys), columns[: HIDDEN + 2 * HEADS].contiguous()
    count = sum(part.numel() for part in three)
    show("quantize 4096+1024+1024, folded", lambda: fused.quantize_tokens(*three, columns=folded), nbytes=3 * count)
    norm = lambda: fused.quantize_tokens(x, columns=weight, epsilon=1e-5)  # noqa: E731
    show("norm + quantize", norm, nbytes=3 * x.numel())
    rstd = norm()[1]
    show("norm backward", lambda: fused.norm_backward(x, x, weight, rstd), nbytes=6 * x.numel())
    show("group128 quantize 4096", lambda: native._quantize(x, GROUP), nbytes=3 * x.numel())
    by_columns = lambda: native._quantize(x, GROUP, scale_by_columns=True)  # noqa: E731
    show("group128 quantize 4096, scales by columns", by_columns, nbytes=3 * x.numel())
    show("gated forward", lambda: fused.gated(wide, other, "silu"), nbytes=7 * wide.numel())
    h, gate, up = fused.gated(wide, other, "silu")
    show(
        "gated backward",
        lambda: fused.gated_backward(wide, gate, up, columns, "silu"),
        nbytes=10 * wide.numel(),
    )
    show("dequantize 14336", lambda: fused.dequantize(h, torch.bfloat16), nbytes=3 * wide.numel())
    low, down = normal(m, 16), normal(16, INNER)
    show("B onto y 14336: addmm in place", lambda: wide.addmm_(low, down), nbytes=4 * wide.numel())
    show("A from x 14336 -> 16: matmul", lambda: wide @ down.mT, nbytes=2 * wide.numel())
    show("dB = dY^T u 14336", lambda: wide.mT @ low, nbytes=2 * wide.numel())
    show("dA = dU^T x 14336", lambda: low.mT @ wide, nbytes=2 * wide.numel())
    for rank in (16, 32):
        thin, b = normal(m, rank), torch.randn(INNER, rank, device="cuda")
        into = torch.empty_like(thin)
        both = lambda thin=thin, b=b, into=into: adapter_gradients.over_output(wide, thin, b, into)  # noqa: E731
        show(f"dU and dB in one pass 14336, rank {rank}", both, nbytes=2 * wide.numel())
    show("A from codes 14336 -> 16: w8a16", lambda: w8a16.linear(down, h, None, "none", None), nbytes=wide.numel())


def group_kernels(show: Callable[..., None], m: int) -> None:
    x, wide, other, weight = normal(m, HIDDEN), normal(m, INNER), normal(m, INNER), torch.rand(HIDDEN, device="cuda")
    norm = lambda: groups.quantize_tokens(x, columns=weight, epsilon=1e-5)  # noqa: E731
    show("group128 norm + quantize 4096", norm, nbytes=3 * x.numel())
    show("group128 quantize 14336", lambda: groups.quantize_tokens(wide), nbytes=3 * wide.numel())
    show("group128 gated forward", lambda: groups.gated(wide, other, "silu"), nbytes=7 * wide.numel())
    _, gate, up = groups.gated(wide, other, "silu")
    backward = lambda: groups.gated_backward(wide, gate, up, None, "silu")  # noqa: E731
    show("group128 gated backward", backward, nbytes=10 * wide.numel())
    q = groups.quantize_tokens(x)[0]
    w = ScaledTensor(q.codes[:INNER], torch.rand(INNER // 128, HIDDEN // 128, device="cuda"), E4M3, groups.BLOCK)
    show("block-scaled product 14336x4096", lambda: groups.product(q, w, torch.bfloat16), flops=2 * m * w.codes.numel())


def adapter_steps(show: Callable[..., None], m: int) -> None:
    for n, k, ranks in ((INNER, HIDDEN, (16, 16)), (HIDDEN, INNER, (16,)), (HEADS, HIDDEN, (16, 16, 16))):
        adapters(show, m, n, k, ranks)


def all_products(show: Callable[..., None], m: int) -> None:
    for n, k in ((28672, 4096), (INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN, HIDDEN), (HEADS, HIDDEN)):
        products(show, m, n, k)


def products(show: Callable[..., None], m: int, n: int, k: int) -> None:
    left, right = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
    a, w = native.quantize_tokens(left)[0], native.quantize_tokens(right)[0]
    flops, one = 2 * m * n * k, torch.ones((), device="cuda")
    show(f"row-scaled product {n}x{k}, short sums", lambda: row_mm(a, w, True), flops=flops)
    show(f"row-scaled product {n}x{k}, long sums", lambda: row_mm(a, w, False), flops=flops)
    show(f"tensor-scaled product {n}x{k}, short sums", lambda: tensor_mm(a, w, one), flops=flops)
    show(f"bfloat16 product {n}x{k}", lambda: left @ right.mT, flops=flops)
    show(f"transpose {n}x{k}", lambda: native.transposed(w.codes), nbytes=2 * n * k)


def adapters(show: Callable[..., None], m: int, n: int, k: int, ranks: tuple[int, ...]) -> None:
    """The adapters' part of a product with a weight [n, k], in columns and by a pass over the result."""
    x, right = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
    downs = [torch.rand(rank, k, device="cuda") / 64 - 1 / 128 for rank in ranks]
    up, w, rank = torch.randn(n, ranks[0], device="cuda") / 1000, native.quantize_tokens(right)[0], sum(ranks)
    q = native.quantize_tokens(x, spare=adapter_columns.room_for(k, rank))[0]
    a, name = adapter_columns.encode_downs(downs, [2.0] * len(ranks)), f"{n}x{k}, R={rank}"
    wide, low = adapter_columns.append_products(q, a, torch.bfloat16)
    ext = adapter_columns.extended(w, up, 0, a)
    show(f"codes of A {name}", lambda: adapter_columns.encode_downs(downs, [2.0] * len(ranks)), nbytes=7 * rank * k)
    show(f"x A^T onto the codes {name}", lambda: adapter_columns.append_products(q, a, torch.bfloat16), nbytes=m * k)
    show(f"dU onto the codes {name}", lambda: adapter_columns.append_gradients(q, low, a), nbytes=m * 8 * rank)
    show(f"W with columns of B {name}", lambda: adapter_columns.extended(w, up, 0, a), nbytes=2 * n * k)
    large = up * 1000
    show(f"W with columns of a large B {name}", lambda: adapter_columns.extended(w, large, 0, a), nbytes=2 * n * k)
    show(f"product with columns {name}", lambda: native.scaled_mm(wide, ext, torch.bfloat16), flops=2 * m * n * k)
    plain, ups, narrow = native.quantize_tokens(x)[0], up.bfloat16().mT, low[:, : ranks[0]]
    show(
        f"product and addmm {name}",
        lambda: native.scaled_mm(plain, w, torch.bfloat16).addmm_(narrow, ups),
        flops=2 * m * n * k,
    )
    dense = lambda: low.mT @ fused.dequantize(plain, torch.bfloat16)  # noqa: E731
    show(f"dA, codes to bfloat16 first {name}", dense, nbytes=m * k)
    show(f"dA from the codes {name}", lambda: adapter_gradients.over_tokens(low, q), nbytes=m * k)
    show(f"A from the codes, one by one {name}", lambda: fused.low_rank(plain, downs, torch.bfloat16), nbytes=m * k)


def row_mm(a: ScaledTensor, w: ScaledTensor, fast: bool) -> torch.Tensor:
    row = F.ScalingType.RowWise
    return F.scaled_mm(
        a.as_float8(), w.as_float8().mT, a.scale, row, w.scale.mT, row, output_dtype=torch.bfloat16, use_fast_accum=fast
    )


def tensor_mm(a: ScaledTensor, w: ScaledTensor, one: torch.Tensor) -> torch.Tensor:
    whole = F.ScalingType.TensorWise
    return F.scaled_mm(
        a.as_float8(), w.as_float8().mT, one, whole, one, whole, output_dtype=torch.bfloat16, use_fast_accum=True
    )


def large_products(show: Callable[..., None], m: int) -> None:
    """The four large shapes, FP8 by row and by block, and bfloat16; m is not asked for."""
    for tokens, n, k in LARGE:
        left, right, flops, name = normal(tokens, k), normal(n, k), 2 * tokens * n * k, f"{tokens}x{n}x{k}"
        a, w = native.quantize_tokens(left)[0], native.quantize_tokens(right)[0]
        for fast, sums in ((True, "short"), (False, "long")):
            show(f"by row, {sums} sums {name}", lambda a=a, w=w, fast=fast: row_mm(a, w, fast), flops=flops)
        grouped, blocks = groups.quantize_tokens(left)[0], quantize_ref(right.float(), E4M3, groups.BLOCK)
        show(f"by block {name}", lambda a=grouped, w=blocks: groups.product(a, w, torch.bfloat16), flops=flops)
        show(f"bfloat16 {name}", lambda left=left, right=right: left @ right.mT, flops=flops)


def attention_backends(show: Callable[..., None], m: int) -> None:
    """Of torch, causal, 32 heads over 8: forward, and both ways."""
    length = 4096
    shapes = [(m // length, heads, length, 128) for heads in (32, 8, 8)]
    q, k, v = (normal(*shape).requires_grad_() for shape in shapes)
    dy, flops = normal(*shapes[0]), 2 * m * 32 * length * 128  # half of the scores
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def forward(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def both(forward: Callable[[], torch.Tensor] = forward) -> object:
            return torch.autograd.grad(forward(), (q, k, v), dy)

        show(f"attention forward, {backend.name}", forward, flops=flops)
        show(f"attention both ways, {backend.name}", both, flops=flops * 7 // 2)


def head(show: Callable[..., None], m: int) -> None:
    """Logits and their gradient's product by tokens at once; Liger takes 512 for this vocabulary."""
    x, w = normal(m, HIDDEN), normal(128256, HIDDEN) / 64
    for chunk in (512, 1024, 2048, 4096):
        part, logits, flops = x[:chunk], x[:chunk] @ w.mT, 2 * chunk * w.numel()
        show(f"logits of {chunk} tokens", lambda part=part: part @ w.mT, flops=flops)
        show(f"their gradient's product, {chunk} tokens", lambda logits=logits: logits @ w, flops=flops)


PARTS = {
    "attention": attention_backends,
    "head": head,
    "rows": row_kernels,
    "adapters": adapter_steps,
    "groups": group_kernels,
    "products": all_products,
    "large": large_products,
}

if __name__ == "__main__":
    sys.exit(main())
