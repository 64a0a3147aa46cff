"""Correctness of operations and modules on a CUDA device: a table for people, then one line of JSON.

    python benchmarks/gpu_check.py [--device cuda] [--only NAME ...] [--out FILE]

Needs torch and nothing else. Exit code 1 where a check fails. Oracles in dB: `arithmetic` against float64 products of
the dequantized operands, `quantization` against the unquantized ones; floors from octavo.testing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import octavo
from octavo import E4M3, E5M2, FrozenFloat8Linear, PerBlock, PerGroup, PerRow, PerTensor, Rule
from octavo.base.hardware import caps_of
from octavo.formats.codec import decode, encode
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.kernels.cuda import loader
from octavo.modules.divergence import PairedScore
from octavo.modules.observers import InputStats
from octavo.modules.static_scale import static_scale
from octavo.ops import adapter_columns, adapter_gradients, fused, groups, native
from octavo.ops.linear import linear
from octavo.ops.lora import Norm, Projection, gated_mlp, project
from octavo.testing import FLOOR_DB, assert_sqnr, sqnr_db

GRANULARITIES = (PerTensor(), PerRow(), PerGroup(128), PerBlock(128, 128), PerBlock(48, 80))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Check = Callable[[str], str]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def awkward(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 30, shape, generator=generator).float())
    x = x.to(dtype)
    for step, value in enumerate((0.0, -0.0, float("inf"), -float("inf"), float("nan"))):
        x.view(-1)[step :: 97 + step] = value
    x[..., 2, :] = 0
    return x


def cases() -> Iterator[tuple[octavo.Rule, torch.dtype]]:
    for spec, granularity, dtype in itertools.product((E4M3, E5M2), GRANULARITIES, DTYPES):
        yield Rule(spec, granularity, scale_format="po2" if dtype == torch.float16 else "fp32"), dtype


@check
def codes_equal_the_cpu(device: str) -> str:
    """Codes and scales of the device are the bits of the CPU reference."""
    for rule, dtype in cases():
        for shape in ((200, 136), (2, 130, 300), (1, 3, 7)):
            x = awkward(shape, dtype)
            want = quantize_ref(x, rule.spec, rule.granularity, scale_format=rule.scale_format)
            found = octavo.quantize(x.to(device), rule)
            assert torch.equal(found.scale.cpu(), want.scale), f"scale {rule} {dtype} {shape}"
            assert torch.equal(found.codes.cpu(), want.codes), f"codes {rule} {dtype} {shape}"
    return f"{len(list(cases())) * 3} cases bit-equal"


@check
def every_bfloat16_and_every_code(device: str) -> str:
    every = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    for spec in (E4M3, E5M2):
        assert torch.equal(encode(every.to(device), spec).cpu(), encode(every, spec)), f"encode {spec}"
        for scale in (1.0, 2.0**-126, 0.0123):
            q = octavo.ScaledTensor(codes, torch.tensor(scale), spec, PerTensor())
            for dtype in DTYPES:
                found, want = octavo.dequantize(q.to(device), dtype).cpu(), dequantize_ref(q, dtype)
                assert torch.equal(found.isnan(), want.isnan()), f"decode {spec} {dtype}"
                assert torch.equal(found.nan_to_num(0), want.nan_to_num(0)), f"decode {spec} {dtype} {scale}"
                plain = q.as_float8().to(device).to(dtype).cpu()
                assert torch.equal(plain.nan_to_num(0), decode(codes, spec).to(dtype).nan_to_num(0)), f"{spec} {dtype}"
    return "65,536 inputs, 256 codes, 2 formats"


@check
def linear_against_both_oracles(device: str) -> str:
    """Forward, dX and db of every granularity, dtype and activation mode, ragged and large."""
    worst: dict[str, float] = {}
    for (n, k), granularity, dtype in itertools.product(((200, 136), (576, 200), (512, 1024)), GRANULARITIES, DTYPES):
        generator = torch.Generator().manual_seed(1)
        w = torch.randn(n, k, generator=generator).to(device)
        q = octavo.quantize(w, Rule(granularity=granularity))
        wq = dequantize_ref(q).double()
        for activation in ("none", "static", "token", "group128"):
            x = torch.randn(3, 70, k, generator=generator).to(device, dtype).requires_grad_()
            grad = torch.randn(3, 70, n, generator=generator).to(device, dtype)
            bias = torch.randn(n, generator=generator).to(device, dtype).requires_grad_()
            scale = torch.tensor(0.01, device=device) if activation == "static" else None
            y = linear(x, q, bias, activation=activation, input_scale=scale)
            y.backward(grad)
            a = x.detach()
            if activation != "none":
                mode = {"static": PerTensor(), "token": PerRow(), "group128": PerGroup(128)}[activation]
                flat = quantize_ref(a.flatten(0, 1), E4M3, mode, scale=scale)
                a = dequantize_ref(flat).reshape(a.shape)
            name = str(dtype).removeprefix("torch.")
            floor, where = FLOOR_DB["dequant", name], f"{granularity} {n}x{k} {name} {activation}"
            found = assert_sqnr(y.detach(), a.double() @ wq.T + bias.detach().double(), floor, f"forward {where}")
            back = assert_sqnr(x.grad, grad.double() @ wq, floor, f"backward {where}")
            assert_sqnr(bias.grad, grad.double().sum((0, 1)), floor, f"bias {where}")
            worst[name] = min(worst.get(name, 999.0), found, back)
            if activation == "none":
                exact = x.detach().double() @ w.double().T + bias.detach().double()
                assert_sqnr(y.detach(), exact, FLOOR_DB["linear", "e4m3", "normal"] - 0.2, f"quantization {where}")
    return "worst arithmetic dB " + ", ".join(f"{name} {db:.1f}" for name, db in worst.items())


@check
def scaled_mm_against_both_oracles(device: str) -> str:
    worst = 999.0
    for spec, granularity in itertools.product((E4M3, E5M2), GRANULARITIES):
        generator = torch.Generator().manual_seed(2)
        a, b = (torch.randn(r, 520, generator=generator).to(device) for r in (130, 260))
        left, right = octavo.quantize(a, Rule(spec)), octavo.quantize(b, Rule(spec, granularity))
        exact = dequantize_ref(left).double() @ dequantize_ref(right).double().T
        for dtype in DTYPES:
            y = octavo.scaled_mm(left, right, dtype)
            worst = min(worst, assert_sqnr(y, exact, FLOOR_DB["dequant", str(dtype).removeprefix("torch.")]))
        assert_sqnr(y, a.double() @ b.double().T, FLOOR_DB["scaled_mm", spec.name, "normal"])
    return f"worst arithmetic dB {worst:.1f}"


@check
def opcheck_every_op(device: str) -> str:
    ops, count = torch.ops.octavo, 0
    for granularity in GRANULARITIES:
        tile = ("e4m3", *granularity.tile)
        x = torch.randn(50, 90, device=device, requires_grad=True)
        q = octavo.quantize(x, Rule(granularity=granularity))
        a = torch.randn(2, 3, 90, device=device, dtype=torch.bfloat16, requires_grad=True)
        scale = torch.tensor(0.01, device=device)
        todo = [
            (ops.quantize, (x.detach(), None, *tile, "absmax", "fp32", "auto")),
            (ops.fake_quantize, (x, None, *tile, "absmax", "fp32", "auto")),
            (ops.dequantize, (q.codes, q.scale, *tile, torch.bfloat16, "auto")),
            (ops.linear, (a, q.codes, q.scale, None, None, *tile, "token", "auto")),
            (ops.linear, (a, q.codes, q.scale, None, scale, *tile, "static", "auto")),
            (ops.linear_dx, (a.detach()[..., :50], q.codes, q.scale, *tile, "auto")),
            (ops.scaled_mm, (q.codes, q.scale, q.codes, q.scale, *tile, *tile, torch.bfloat16, "auto")),
        ]
        for op, args in todo:
            torch.library.opcheck(op.default, args)
            count += 1
    return f"{count} calls"


@check
def compiles_without_a_break(device: str) -> str:
    for granularity, backend in itertools.product((PerTensor(), PerBlock(128, 128)), ("aot_eager", "inductor")):
        torch._dynamo.reset()
        source = nn.Linear(136, 200, device=device, dtype=torch.bfloat16)
        layer = FrozenFloat8Linear.from_linear(source, Rule(granularity=granularity), "token")
        model = nn.Sequential(layer, nn.SiLU(), nn.Linear(200, 40, device=device, dtype=torch.bfloat16))
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        x = torch.randn(9, 136, device=device, dtype=torch.bfloat16, requires_grad=True)
        want = torch.autograd.grad(model(x).float().square().sum(), x)[0]
        found = torch.autograd.grad(compiled(x).float().square().sum(), x)[0]
        assert_sqnr(found, want, 40.0, f"{granularity} {backend}")
    return "tensor and block128, aot_eager and inductor"


@check
def module_moves_and_saves(device: str) -> str:
    for granularity in GRANULARITIES:
        layer = FrozenFloat8Linear.from_linear(nn.Linear(136, 200), Rule(granularity=granularity), "token")
        codes, scale = layer.weight.detach().clone(), layer.weight_scale.detach().clone()
        moved = copy.deepcopy(layer.to(device).half()).to(torch.bfloat16).float()
        moved.load_state_dict(layer.state_dict(), assign=True)
        back = moved.cpu()
        assert torch.equal(back.weight, codes) and torch.equal(back.weight_scale, scale), str(granularity)
        assert back.weight_scale.dtype == torch.float32
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        assert layer.to(device)(torch.randn(2, 136, device=device)).dtype == torch.bfloat16
    return "to, half, float, deepcopy, state_dict, autocast"


@check
def what_calibrate_and_eval_count(device: str) -> str:
    """Input scales, percentiles and divergences from statistics and logits on the device; tokens stay on the host."""
    x, logits = torch.randn(300, 96), torch.randn(2, 60, 40)
    here, there = (InputStats.of(x.to(place), 2) for place in ("cpu", device))
    for stats in (here, there):
        stats.merge(stats)
    assert static_scale(here) == static_scale(there) and here.percentile(99.0) == there.percentile(99.0)
    tokens, kl = torch.randint(40, (60,)), []
    for place in ("cpu", device):
        score = PairedScore()
        score.add(*logits.to(place), tokens)
        kl.append(score.result().kl.mean)
    assert abs(kl[1] / kl[0] - 1) < 1e-5
    return "static scale, percentile, KL"


@check
def our_kernels(device: str) -> str:
    """Backends w8a16 and native: quantized bits of the reference, products to their floors, gradients, decoded bits."""
    if torch.device(device).type != "cuda":
        return "skipped: CUDA only (tests/kernels runs the same sources on the host)"
    count = 0
    for granularity, dtype, m in itertools.product(
        (PerTensor(), PerRow(), PerBlock(128, 128)), (torch.bfloat16, torch.float16), (1, 8, 16, 17, 300)
    ):
        for n, k in ((200, 136), (576, 1536), (1024, 4096)):
            q = octavo.quantize(torch.randn(n, k, device=device) * 0.1, Rule(granularity=granularity))
            x, grad = (torch.randn(m, width, device=device, dtype=dtype) for width in (k, n))
            w = dequantize_ref(q).double()
            floor = FLOOR_DB["dequant", "bfloat16" if dtype == torch.bfloat16 else "float16"] - 2
            assert_sqnr(linear(x, q, backend="w8a16"), x.double() @ w.mT, floor, f"{granularity} {dtype} {m} {n}x{k}")
            found = torch.ops.octavo.linear_dx(grad, q.codes, q.scale, "e4m3", *granularity.tile, "w8a16")
            assert_sqnr(found, grad.double() @ w, floor, f"dX {granularity} {dtype} {m} {n}x{k}")
            decoded = octavo.dequantize(q, dtype, backend="w8a16")
            assert torch.equal(decoded, dequantize_ref(q, dtype)), f"decoded {granularity} {dtype} {n}x{k}"
            count += 3
    for rule in (Rule(granularity=PerRow()), Rule(granularity=PerGroup(128)), Rule(granularity=PerTensor())):
        for dtype, shape in itertools.product((torch.bfloat16, torch.float16), ((200, 136), (1000, 4096))):
            x = awkward(shape, dtype).to(device)
            found, want = octavo.quantize(x, rule, backend="native"), quantize_ref(x, rule.spec, rule.granularity)
            assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale), f"{rule} {dtype}"
            given = octavo.quantize(x, rule, scale=want.scale * 0.7, backend="native").codes
            wanted = quantize_ref(x, rule.spec, rule.granularity, scale=want.scale * 0.7).codes
            assert torch.equal(given, wanted), f"given scales, {rule} {dtype}"
            count += 2
    for granularity, activation in ((PerRow(), "token"), (PerTensor(), "token"), (PerBlock(128, 128), "group128")):
        q = octavo.quantize(torch.randn(1024, 2048, device=device), Rule(granularity=granularity))
        x, grad = (torch.randn(300, width, device=device, dtype=torch.bfloat16) for width in (2048, 1024))
        want = linear(x.double(), q, activation=activation, backend="reference")
        assert_sqnr(linear(x, q, activation=activation, backend="native"), want, 45.0, f"native {granularity}")
        if activation == "token":
            found = torch.ops.octavo.linear_dx(grad, q.codes, q.scale, "e4m3", *granularity.tile, "native")
            assert_sqnr(found, grad.double() @ dequantize_ref(q).double(), FLOOR_DB["linear", "e4m3", "normal"])
        count += 1
    return f"{count} cases"


@check
def fused_steps_of_a_layer(device: str) -> str:
    """Kernels of a decoder layer against the same function in torch, and whole blocks against float64 autograd."""
    if torch.device(device).type != "cuda":
        return "skipped: CUDA only (tests/kernels and tests/ops run the same on the host)"
    kernels, worst = fused.on_kernels, 999.0

    def both(function: Callable[..., object], *args: object, **options: object) -> list[list[torch.Tensor]]:
        results = []
        for on in (True, False):
            fused.on_kernels = lambda x, on=on: on
            found = function(*args, **options)
            parts = found if isinstance(found, tuple) else (found,)
            results.append(
                [dequantize_ref(p) if isinstance(p, octavo.ScaledTensor) else p for p in parts if p is not None]
            )
        fused.on_kernels = kernels
        return results

    for m, k in ((1, 64), (17, 2056), (300, 4096), (128, 14336)):
        x, y, z = (torch.randn(m, k, device=device, dtype=torch.bfloat16) * 2.0**i for i in (-3, 0, 3))
        columns, rstd = torch.rand(2 * k, device=device), torch.rand(m, device=device) + 0.5
        _, gate, up = fused.gated(x, y, "silu")
        for function, args, options in (
            (fused.quantize_tokens, (x,), {"columns": columns[:k].contiguous(), "epsilon": 1e-5}),
            (fused.quantize_tokens, (x, y), {"columns": columns}),
            (fused.norm_backward, (x, y, columns[:k].contiguous(), rstd, z), {}),
            (fused.gated, (x, y, "silu"), {}),
            (fused.gated, (x, y, "gelu_tanh"), {}),
            (fused.gated_backward, (z, gate, up, columns, "silu"), {}),
            (fused.gated_backward, (z, gate, up, columns, "gelu_tanh"), {}),
        ):
            ours, theirs = both(function, *args, **options)
            for mine, want in zip(ours, theirs, strict=True):
                worst = min(worst, assert_sqnr(mine, want, 40.0, f"{function.__name__} {m}x{k}"))
    for m in (1, 17, 4095):
        x = torch.randn(m, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
        wide = x.detach().double().requires_grad_()
        p = Projection(
            octavo.quantize(torch.randn(1024, 512, device=device), Rule()),
            None,
            (torch.randn(16, 512, device=device) / 22).requires_grad_(),
            (torch.randn(1024, 16, device=device) / 4).requires_grad_(),
        )
        (y,) = project(x, [p, p, p][:1])
        grad = torch.randn_like(y)
        y.backward(grad)
        found = [x.grad, p.a.grad, p.b.grad]
        p.a.grad = p.b.grad = None
        seen = wide + (dequantize_ref(quantize_ref(x.detach(), E4M3, PerRow())).double() - wide).detach()
        want = seen @ dequantize_ref(p.weight).double().mT + (seen @ p.a.double().mT) @ p.b.double().mT
        assert_sqnr(y, want, 45.0, f"block M={m}")
        want.backward(grad.double())
        for mine, theirs in zip(found, [wide.grad, p.a.grad, p.b.grad], strict=True):
            floor = FLOOR_DB["linear", "e4m3", "normal"] - (1 if m == 1 else 0)  # one token: a few hundred errors
            assert_sqnr(mine, theirs, floor, f"gradients of a block, M={m}")
    return f"worst against torch {worst:.1f} dB"


@check
def adapters_in_columns(device: str) -> str:
    """Codes of A, B and the tokens' low-rank values bit for bit as in torch; the products with them against float64."""
    if torch.device(device).type != "cuda":
        return "skipped: CUDA only (tests/kernels runs the same on the host)"
    kernels, worst = fused.on_kernels, 999.0
    for m, n, k, ranks, power in (
        (17, 48, 512, (8,), 0),
        (300, 1024, 4096, (16, 16, 16), 0),
        (64, 256, 14336, (16,), 12),
    ):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w = octavo.quantize(torch.randn(n, k, device=device) / 50, Rule())
        downs = [(torch.rand(rank, k, device=device) - 0.5) / 32 for rank in ranks]
        up, low = (
            torch.randn(n, ranks[-1], device=device) * 0.01 * 2.0**power,
            torch.randn(m, sum(ranks), device=device),
        )
        results = []
        for on in (True, False):
            fused.on_kernels = lambda x, on=on: on
            a = adapter_columns.encode_downs(downs, [2.0] * len(ranks))
            wide = adapter_columns.extended(w, up, sum(ranks[:-1]), a)
            q = fused.quantize_tokens(x, spare=adapter_columns.room_for(k, sum(ranks)))[0]
            forward, kept = adapter_columns.append_products(q, a, torch.bfloat16)
            q = fused.quantize_tokens(x, spare=a.room)[0]
            backward = adapter_columns.append_gradients(q, low.bfloat16(), a)
            results.append(
                [a.codes, a.unit, wide.codes, wide.scale, forward.codes, kept, backward.codes, backward.scale]
            )
        fused.on_kernels = kernels
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True)), (m, n, k)
        sums = adapter_gradients.over_tokens(low.bfloat16(), forward).sum(0)[:, :k]
        dy, into = torch.randn(m, n, device=device, dtype=torch.bfloat16), torch.empty(m, ranks[-1], device=device)
        into, part = into.bfloat16(), low.bfloat16()[:, -ranks[-1] :]
        db = adapter_gradients.over_output(dy, part, up, into)
        assert_sqnr(into, dy.double() @ up.bfloat16().double(), 54.0, "dY B")
        assert_sqnr(db, dy.double().mT @ part.double(), 54.0, "dB")
        assert_sqnr(sums, low.bfloat16().double().mT @ dequantize_ref(forward).double()[:, :k], 54.0, "dA")
        y = native.scaled_mm(forward, wide, torch.bfloat16)
        seen = dequantize_ref(forward).double()[:, :k]
        a = torch.cat(downs)[-ranks[-1] :].double()
        want = seen @ dequantize_ref(w).double().mT + 2.0 * (seen @ a.mT) @ up.double().mT
        worst = min(worst, assert_sqnr(y, want, 45.0, f"adapter in columns {m}x{n}x{k}"))
    return f"bits equal, worst product {worst:.1f} dB"


@check
def layers_per_block(device: str) -> str:
    """Weights with scales per block: kernels against torch, and blocks of a layer against float64 autograd."""
    if torch.device(device).type != "cuda" or caps_of(torch.device(device)).sm != (9, 0):
        return "skipped: cuBLAS multiplies by such weights on sm90 only"
    kernels, worst = fused.on_kernels, 999.0
    for m, k in ((4, 128), (300, 4096), (128, 14336)):
        x, y, z = (torch.randn(m, k, device=device, dtype=torch.bfloat16) * 2.0**i for i in (-3, 0, 3))
        weight, results = torch.rand(k, device=device), []
        for on in (True, False):
            fused.on_kernels = lambda x, on=on: on
            made = [
                *groups.quantize_tokens(x, columns=weight, epsilon=1e-5),
                groups.quantize_tokens(x, y, spare=128)[0],
            ]
            made += groups.gated(x, y, "silu")
            results.append(made + list(groups.gated_backward(z, made[4], made[5], None, "silu")))
        fused.on_kernels = kernels
        for ours, theirs in zip(*results, strict=True):
            mine, want = (dequantize_ref(p) if isinstance(p, octavo.ScaledTensor) else p for p in (ours, theirs))
            worst = min(worst, assert_sqnr(mine, want, 40.0, f"{m}x{k}"))
    for m, n, k, rank in ((4, 128, 128, 4), (300, 1024, 512, 16), (300, 640, 4096, 48), (300, 512, 4096, 0)):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
        wide = x.detach().double().requires_grad_()
        w = octavo.quantize(torch.randn(n, k, device=device) / k**0.5, Rule(granularity=PerBlock(128, 128)))
        a, b = (torch.randn(s, device=device).div(s[1] ** 0.5).requires_grad_() for s in ((rank, k), (n, max(rank, 1))))
        (y,) = project(x, [Projection(w, None, a, b) if rank else Projection(w)])
        grad = torch.randn_like(y)
        adapter = [a, b] if rank else []
        found = torch.autograd.grad(y, [x, *adapter], grad)
        seen = wide + (dequantize_ref(quantize_ref(x.detach(), E4M3, PerGroup(128))).double() - wide).detach()
        want = seen @ dequantize_ref(w).double().mT
        want = want + (seen @ a.double().mT) @ b.double().mT if rank else want
        worst = min(worst, assert_sqnr(y, want, 45.0, f"output {m}x{n}x{k}"))
        for mine, theirs in zip(found, torch.autograd.grad(want, [wide, *adapter], grad.double()), strict=True):
            assert_sqnr(mine, theirs, FLOOR_DB["linear", "e4m3", "normal"] - 1, f"gradients {m}x{n}x{k}")
    return f"worst against torch, and of outputs, {worst:.1f} dB"


@check
def overlap_changes_nothing(device: str) -> str:
    """Gradients of layers, bit for bit, whether kernels may be set up before the one before has ended or not."""
    if torch.device(device).type != "cuda":
        return "skipped: CUDA only"
    hidden, inner, x = 2048, 5632, torch.randn(1536, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)
    norm = Norm(torch.rand(hidden, device=device) + 0.5, 1e-5)

    def projection(n: int, k: int) -> Projection:
        a, b = torch.randn(16, k, device=device) / k**0.5, torch.randn(n, 16, device=device) / 50
        w = octavo.quantize(torch.randn(n, k, device=device) / k**0.5)
        return Projection(w, None, a.requires_grad_(), b.requires_grad_(), 2.0)

    widths = (hidden, hidden), (512, hidden), (512, hidden), (hidden, hidden), *[(inner, hidden)] * 2, (hidden, inner)
    layers = [[projection(n, k) for n, k in widths] for _ in range(4)]
    trained = [part for layer in layers for p in layer for part in p.adapter if part is not None]

    def gradients() -> tuple[torch.Tensor, ...]:
        y: torch.Tensor = x
        for *qkv, o, gate, up, down in layers:
            q, k, v, y = project(y, qkv, norm, pass_on=True)
            mixed = q * torch.cat([k, v, k, v], dim=1)
            y = gated_mlp(y, gate, up, down, "silu", norm, residual=True, delta=project(mixed, [o], x_stays=True)[0])
        return torch.autograd.grad(y.float().square().mean(), [x, *trained])

    allowed, found = loader.may_overlap, []
    for may in (False, True, True, True):
        loader.may_overlap = lambda sm, may=may: may and allowed(sm)
        loader._prepared.cache_clear()
        found.append(gradients())
    loader.may_overlap = allowed
    loader._prepared.cache_clear()
    assert all(torch.equal(one, other) for grads in found[1:] for one, other in zip(found[0], grads, strict=True))
    assert all(bool(grad.isfinite().all()) and bool(grad.any()) for grad in found[0])
    return f"{len(found[0])} gradients, {len(found)} times"


@check
def fast_sums(device: str) -> str:
    """What short sums cost in dB against exact products of the same codes; random and all-positive operands."""
    if torch.device(device).type != "cuda":
        return "skipped: CUDA only"
    found = []
    for k in (1024, 4096, 14336, 32768, 65536):
        for kind in ("random", "positive"):
            a, b = (torch.randn(256, k, device=device, dtype=torch.bfloat16) for _ in range(2))
            if kind == "positive":
                a, b = a.abs(), b.abs()
            left, right = native.quantize_tokens(a)[0], native.quantize_tokens(b)[0]
            exact = dequantize_ref(left).double() @ dequantize_ref(right).double().mT
            decibels = []
            for fast in (True, False):
                row = F.ScalingType.RowWise
                y = F.scaled_mm(
                    left.as_float8(), right.as_float8().mT, left.scale, row, right.scale.mT, row,
                    output_dtype=torch.bfloat16, use_fast_accum=fast,
                )  # fmt: skip
                decibels.append(f"{sqnr_db(y, exact):.1f}")
            found.append(f"K={k} {kind} {'/'.join(decibels)}")
    return "fast/slow dB: " + ", ".join(found)


@check
def nothing_wide_is_kept_for_backward(device: str) -> str:
    if torch.device(device).type != "cuda":
        return "skipped: needs CUDA's memory counters"
    layer = FrozenFloat8Linear.from_linear(nn.Linear(8192, 8192, device=device, dtype=torch.bfloat16, bias=False))
    x = torch.randn(256, 8192, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= y.numel() * y.element_size() + 2**20, kept
    return f"{kept / 2**20:.1f} MiB kept, the output is {y.numel() * 2 / 2**20:.1f} MiB"


@check
def speed_for_the_log(device: str) -> str:
    """Not a claim: where the plain backend stands before any kernel is written."""
    if torch.device(device).type != "cuda":
        return "skipped: CUDA only"
    w = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    q = octavo.quantize(w)
    parts = []
    for m in (1, 64, 4096):
        x = torch.randn(m, 4096, device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            plain, ours = milliseconds(lambda x=x: F.linear(x, w)), milliseconds(lambda x=x: linear(x, q))
        parts.append(f"M={m} {ours:.3f} ms (BF16 {plain:.3f})")
    return ", ".join(parts) + f", quantize {milliseconds(lambda: octavo.quantize(w)):.3f} ms"


def milliseconds(call: Callable[[], object], rounds: int = 20) -> float:
    for _ in range(3):
        call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(rounds):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / rounds


def main(checks: list[Check] = CHECKS, about: str | None = __doc__) -> int:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", help="names of checks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"torch {torch.__version__}, {caps_of(args.device)}", flush=True)
    for function in checks:
        if args.only and function.__name__ not in args.only:
            continue
        start = time.perf_counter()
        try:
            detail, ok = function(args.device), True
        except Exception as error:
            detail, ok = f"{type(error).__name__}: {error}"[:600], False
        seconds = round(time.perf_counter() - start, 1)
        rows.append({"check": function.__name__, "ok": ok, "detail": detail, "seconds": seconds})
        print(f"{'ok  ' if ok else 'FAIL'} {function.__name__:36} {seconds:6.1f} s  {detail}", flush=True)
    report = {"torch": torch.__version__, "device": str(caps_of(args.device)), "checks": rows}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
