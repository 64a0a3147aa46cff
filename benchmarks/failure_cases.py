"""What breaks FP8 fine-tuning elsewhere, case by case, on this device: a table for people, then one line of JSON.

    python benchmarks/failure_cases.py [--device cuda] [--only NAME ...] [--out FILE]

Needs torch, Transformers and PEFT; no weights. Exit code 1 where a case fails. On a CPU torch's own product stands in
for the tensor cores, so that the same code is a test of the arithmetic (tests/ops/test_failure_cases.py).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import gpu_check

from octavo import PerBlock, PerRow, PerTensor, Recipe, Rule, convert, explain, load, quantize
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.integrations import fused
from octavo.integrations.peft import get_peft_model
from octavo.ops.linear import linear
from octavo.ops.lora import Norm, Projection, gated_mlp, project
from octavo.testing import FLOOR_DB, assert_sqnr

CHECKS: list[gpu_check.Check] = []
QUANTIZED = FLOOR_DB["linear", "e4m3", "normal"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def check(function: gpu_check.Check) -> gpu_check.Check:
    CHECKS.append(function)
    return function


def random(shape: tuple[int, ...], device: str, seed: int = 0) -> torch.Tensor:
    """The same values on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def projection(n: int, k: int, device: str, seed: int = 0, rank: int = 8, weight: Any = None) -> Projection:
    if weight is None:
        weight = random((n, k), device, seed) * random((n, 1), device, seed + 1).abs() / k**0.5
    a = (random((rank, k), device, seed + 2) / k**0.5).requires_grad_()
    b = (random((n, rank), device, seed + 3) / rank**0.5).requires_grad_()
    return Projection(quantize(weight, Rule()), None, a, b, 0.5)


def block(x: torch.Tensor, parts: list[Projection], grad: torch.Tensor | None = None) -> list[torch.Tensor]:
    """norm + gate + up + down and norm + one projection: outputs, gradients of x and of all adapters."""
    device, k = x.device, x.shape[-1]
    x = x.detach().clone().requires_grad_()
    norm = Norm(random((k,), str(device), 9).abs() + 0.5, 1e-6)
    gate, up, down, other = parts
    outputs = [gated_mlp(x, gate, up, down, "silu", norm), *project(x, [other], norm)]
    grads = [random(tuple(y.shape), str(device), 11).to(y.dtype) if grad is None else grad.to(y.dtype) for y in outputs]
    adapters = [part for p in parts for part in p.adapter]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, [x, *adapters], grads))


def parts_of(k: int, n: int, device: str) -> list[Projection]:
    shapes = ((n, k), (n, k), (k, n), (k, k))
    return [projection(*shape, device, 20 * i) for i, shape in enumerate(shapes)]


def finite(tensors: list[torch.Tensor], where: str) -> None:
    for i, tensor in enumerate(tensors):
        assert bool(tensor.isfinite().all()), f"{where}: tensor {i} has NaN or Inf"


@check
def zeros_and_specks(device: str) -> str:
    """Zero tokens, zero rows of a weight, magnitudes near the end of float32: finite, and zero where it should be."""
    k, n = 64, 96
    parts = parts_of(k, n, device)
    x = random((12, k), device).bfloat16()
    x[3:7] = 0
    found = block(x, parts)
    finite(found, "zero tokens")
    assert not found[0][3:7].any() and not found[1][3:7].any(), "a zero token has a zero output"
    finite(block(torch.zeros_like(x), parts), "nothing but zeros")
    weight = random((n, k), device)
    weight[5:9] = 0
    holes = projection(n, k, device, weight=weight, rank=8)
    assert not dequantize_ref(holes.weight)[5:9].any() and bool(holes.weight.scale.isfinite().all())
    for value in (1e-40, 1e-38, 1e-30):
        speck = projection(k, k, device, weight=torch.full((k, k), value, device=device))
        for p, scale in itertools.product((speck, holes), (value, 1.0)):
            y = torch.full((4, k), scale, device=device).bfloat16().requires_grad_()
            (out,) = project(y, [p])
            finite([out, *torch.autograd.grad(out, [y, p.a, p.b], torch.full_like(out, value))], f"{value:g}")
    return "tokens, rows, 1e-40 to 1e-30"


@check
def first_step_of_an_adapter(device: str) -> str:
    """B = 0: the gradient of A is zero, that of B is not; a gradient of zeros gives zeros."""
    p = projection(96, 64, device)
    with torch.no_grad():
        p.b.zero_()
    x = random((10, 64), device).bfloat16().requires_grad_()
    (y,) = project(x, [p])
    dx, da, db = torch.autograd.grad(y, [x, p.a, p.b], torch.ones_like(y))
    finite([dx, da, db], "B = 0")
    assert not da.any() and db.any() and dx.any()
    found = block(x, parts_of(64, 96, device), torch.zeros(10, 64, device=device))
    assert not any(grad.any() for grad in found[2:]), "a gradient of zeros"
    return "zero dA, zero dY"


@check
def loss_scaled_by_powers_of_two(device: str) -> str:
    """2**24 and 2**-24 times the loss: the same multiple of every gradient, bit for bit."""
    x, grad = random((33, 64), device).bfloat16(), random((33, 64), device, 3).bfloat16()
    parts = parts_of(64, 96, device)
    plain = block(x, parts, grad)[2:]
    for power in (-24, 24):
        for i, (mine, want) in enumerate(zip(block(x, parts, grad * 2.0**power)[2:], plain, strict=True)):
            assert torch.equal(mine.float(), want.float() * 2.0**power), f"2**{power}, gradient {i}"
    return "dX, dA, dB of a block"


@check
def any_number_of_tokens(device: str) -> str:
    """One to 4,095 tokens: outputs and gradients against float64 autograd over the dequantized operands."""
    worst = 999.0
    p = projection(96, 64, device)
    for m in (1, 2, 3, 15, 17, 127, 129, 1000, 4095):
        x, grad = random((m, 64), device, m).bfloat16(), random((m, 96), device, m + 1).bfloat16()
        worst = min(worst, against_float64(p, x, grad, f"{m} tokens"))
        finite(block(x, parts_of(64, 96, device)), f"{m} tokens")
    return f"worst gradient {worst:.1f} dB"


def against_float64(p: Projection, x: torch.Tensor, grad: torch.Tensor, where: str) -> float:
    x = x.requires_grad_()
    (y,) = project(x, [p])
    found = torch.autograd.grad(y, [x, p.a, p.b], grad)
    wide = x.detach().double().requires_grad_()
    seen = wide + (dequantize_ref(quantize_ref(x.detach(), E4M3, PerRow())).double() - wide).detach()
    want_y = seen @ dequantize_ref(p.weight).double().mT + p.scaling * (seen @ p.a.double().mT) @ p.b.double().mT
    want = torch.autograd.grad(want_y, [wide, p.a, p.b], grad.double())
    assert_sqnr(y.detach(), want_y.detach(), 45.0, where)
    few = 1.0 if len(x) < 16 else 0.0  # a few hundred rounding errors scatter about their mean
    return min(assert_sqnr(mine, theirs, QUANTIZED - few, where) for mine, theirs in zip(found, want, strict=True))


@check
def odd_features(device: str) -> str:
    """Sizes that are no multiple of 128: fused where they are one of 16, and the plain layers where they are not."""
    for n, k in ((576, 7168), (7168, 576), (576, 1536)):
        # Not the seed of the weight: tokens equal to its rows have sums of squares, where short sums lose bits.
        x, grad = random((50, k), device, 5).bfloat16(), random((50, n), device, 1).bfloat16()
        against_float64(projection(n, k, device), x, grad, f"{n}x{k}")
    for granularity, activation in itertools.product((PerRow(), PerTensor(), PerBlock(128, 128)), ("none", "token")):
        x, grad = random((50, 136), device).bfloat16().requires_grad_(), random((50, 200), device, 1).bfloat16()
        q = quantize(random((200, 136), device), Rule(granularity=granularity))
        y = linear(x, q, activation=activation)
        (dx,) = torch.autograd.grad(y, x, grad)
        a = x.detach() if activation == "none" else dequantize_ref(quantize_ref(x.detach(), E4M3, PerRow()))
        assert_sqnr(y.detach(), a.double() @ dequantize_ref(q).double().mT, 45.0, f"200x136 {granularity} {activation}")
        assert_sqnr(dx, grad.double() @ dequantize_ref(q).double(), QUANTIZED, f"dX 200x136 {granularity}")
    return "576x7168, 7168x576, 576x1536 fused; 200x136 plain"


@check
def block_scales_of_any_count(device: str) -> str:
    """K/128 of 1 to 7, a scale of its own for every block: cuBLAS reads these scales in fours."""
    for blocks in (1, 2, 3, 5, 6, 7):
        n, k = 256, 128 * blocks
        steps = torch.exp2(torch.arange(2 * blocks, device=device).reshape(2, blocks).float() % 11 - 5)
        q = quantize(random((n, k), device), Rule(granularity=PerBlock(128, 128)))
        q = ScaledTensor(q.codes, q.scale * steps, q.spec, q.granularity)
        x = random((64, k), device, blocks).bfloat16()
        want = linear(x.double(), q, activation="group128", backend="reference")
        assert_sqnr(linear(x, q, activation="group128"), want, 45.0, f"K = 128 * {blocks}")
    return "K = 128 * (1, 2, 3, 5, 6, 7)"


@check
def long_sums_of_positive_products(device: str) -> str:
    """K = 65,536 and no cancellation: what short sums of the tensor cores lose would show as a bias."""
    k = 65536
    x, w = random((32, k), device).abs().bfloat16(), random((64, k), device, 1).abs()
    q = quantize(w, Rule())
    (y,) = project(x, [Projection(q)])
    exact = dequantize_ref(quantize_ref(x, E4M3, PerRow())).double() @ dequantize_ref(q).double().mT
    relative = (y.double() - exact) / exact
    assert abs(float(relative.mean())) < 1e-3 and float(relative.abs().max()) < 2**-8, relative.abs().max()
    return f"mean error {float(relative.mean()):.1e}, largest {float(relative.abs().max()):.1e}"


@check
def sums_that_grow(device: str) -> str:
    """What a neuron that fires computes: a token with a tenth of its length along a row of W, whose products add up.

    Against exact sums of the same codes; a bias of these outputs, the largest of all, is what short sums cost.
    """
    found = []
    for k in (1024, 4096, 14336):
        w = random((64, k), device, 1)
        x = (0.1 * w + 0.99 * random((64, k), device, 2)).bfloat16()
        q = quantize(w, Rule())
        (y,) = project(x, [Projection(q)])
        exact = dequantize_ref(quantize_ref(x, E4M3, PerRow())).double() @ dequantize_ref(q).double().mT
        bias = float((y.double().diagonal() / exact.diagonal()).mean() - 1)
        found.append((k, bias))
    text = ", ".join(f"K={k} {100 * bias:+.2f} %" for k, bias in found)
    assert all(abs(bias) < 0.01 for _, bias in found), text
    return text


@check
def padding_is_nobody_s_business(device: str) -> str:
    """Rows of 1e4 behind the real tokens change no real output or gradient, and add nothing to an adapter's."""
    x, parts = random((37, 64), device).bfloat16(), parts_of(64, 96, device)
    grad = random((37, 64), device, 5)
    want = block(x, parts, grad)
    for rows in (1, 11, 127):
        padded = torch.cat([x, torch.full((rows, 64), 1e4, device=device).bfloat16()])
        found = block(padded, parts, torch.cat([grad, torch.zeros(rows, 64, device=device)]))
        for i, (mine, theirs) in enumerate(zip(found, want, strict=True)):
            mine = mine[:37] if i < 3 else mine  # two outputs and dX have a row a token
            assert_sqnr(mine, theirs, 50.0, f"{rows} rows of padding, tensor {i}")
        assert not found[2][37:].any(), "the gradient of padding"
    return "1, 11, 127 rows"


@check
def nan_comes_out(device: str) -> str:
    """A NaN in one token is NaN in its output and its dX, not a zero, and in the norm of the gradients; no other token
    has any. (A kernel may read NaN codes as numbers where another gradient tells: over_tokens.cu.)"""
    x = random((9, 64), device).bfloat16()
    x[4, 7] = float("nan")
    found = block(x, parts_of(64, 96, device))
    for i, y in enumerate(found[:3]):
        assert bool(y[4].isnan().all()) and bool(y[:4].isfinite().all()) and bool(y[5:].isfinite().all()), f"tensor {i}"
    assert not torch.nn.utils.get_total_norm(found[3:]).isfinite()
    return "one token of nine"


@check
def small_steps_move_the_masters(device: str) -> str:
    """Learning rate 1e-5, 250 steps: each below what BF16 could add to the weights, all of them kept by float32."""
    p = projection(48, 32, device, rank=4)
    start = [part.detach().clone() for part in p.adapter]
    optimizer = torch.optim.AdamW(p.adapter, lr=1e-5, weight_decay=0.0)
    x = random((16, 32), device).bfloat16()
    for _ in range(250):
        (y,) = project(x, [p])
        y.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [(part.detach() - before).abs() for part, before in zip(p.adapter, start, strict=True)]
    assert all(1.25e-3 < float(m.median()) < 5e-3 for m in moved), [float(m.median()) for m in moved]
    lost = [(before.bfloat16() + 1e-5 == before.bfloat16()).float().mean() for before in start]
    assert all(share > 0.9 for share in lost), "BF16 masters would not have moved"
    return f"moved by {float(moved[0].median()):.4f} and {float(moved[1].median()):.4f}"


def tiny(device: str, hidden: int = 64, intermediate: int = 96) -> nn.Module:
    """Two layers of a Llama in FP8 with adapters, fused where the sizes allow it."""
    return adapted(convert(llama(hidden, intermediate), Recipe.named("channel", activation="token")), device)


def llama(hidden: int = 64, intermediate: int = 96) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    config = LlamaConfig(hidden_size=hidden, intermediate_size=intermediate, head_dim=16, **sizes)
    return LlamaForCausalLM(config).bfloat16()


def adapted(model: nn.Module, device: str, adapt: Callable[..., Any] = get_peft_model) -> Any:
    model = adapt(model, LoraConfig(r=8, target_modules=LINEARS, task_type="CAUSAL_LM"))
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            assert parameter.dtype == torch.float32, f"{name}: masters are float32"
            parameter.data.copy_(random(tuple(parameter.shape), device, i) / 20)
    return model.to(device).train()


@contextlib.contextmanager
def repeatable(device: str) -> Iterator[None]:
    """Fused layers on a CPU too, and an attention whose gradient has one order of sums."""
    before = fused.products_run
    if torch.device(device).type == "cpu":
        fused.products_run = lambda shape, device: True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        fused.products_run = before


def gradients(model: nn.Module, ids: torch.Tensor, zero: bool = True, **inputs: Any) -> dict[str, torch.Tensor]:
    if zero:
        model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False, **inputs)
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **found}


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], where: str) -> None:
    assert mine.keys() == theirs.keys(), where
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), f"{where}: {name}"


@check
def recomputation_changes_nothing(device: str) -> str:
    ids = torch.randint(128, (2, 13), generator=torch.Generator().manual_seed(1)).to(device)
    for hidden, intermediate in ((64, 96), (136, 200)):
        with repeatable(device):
            model = tiny(device, hidden, intermediate)
            want = gradients(model, ids)
            equal(gradients(model, ids), want, "again")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            equal(gradients(model, ids), want, f"recomputed, {hidden}x{intermediate}")
    return "64x96, 136x200"


@check
def accumulation_adds_up(device: str) -> str:
    """Two micro-batches without zero_grad: the sum of their gradients, and twice the mean of the batch of both."""
    ids = torch.randint(128, (4, 13), generator=torch.Generator().manual_seed(1)).to(device)
    with repeatable(device):
        model = tiny(device)
        first, second = gradients(model, ids[:2]), gradients(model, ids[2:])
        gradients(model, ids[:2])
        both = gradients(model, ids[2:], zero=False)
        together = gradients(model, ids)
    for name in both.keys() - {"logits"}:
        assert torch.equal(both[name], first[name] + second[name]), name
        assert_sqnr(both[name], 2 * together[name], 20.0, name)
    return "2 x 2 sequences"


@check
def autocast_changes_nothing(device: str) -> str:
    """BF16 autocast, as a trainer has it, gives the bits of none on a GPU; with another dtype the plain layers run."""
    kind, x, parts = torch.device(device).type, random((13, 64), device).bfloat16(), parts_of(64, 96, device)
    want = block(x, parts)
    with torch.autocast(kind, torch.bfloat16):
        found = block(x, parts)
    for i, (mine, theirs) in enumerate(zip(found, want, strict=True)):  # torch's own product heeds autocast
        assert torch.equal(mine, theirs) if kind == "cuda" else assert_sqnr(mine, theirs, 30.0, f"tensor {i}")
    ids = torch.randint(128, (2, 13), generator=torch.Generator().manual_seed(1)).to(device)
    with repeatable(device):
        model = tiny(device)
        want = gradients(model, ids)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(kind, dtype):
                found = gradients(model, ids)
            for name in want:  # attention rounds elsewhere under autocast, which flips codes
                assert_sqnr(found[name], want[name], 18.0, f"{dtype} {name}")
    return "a block, a model in bfloat16 and float16"


@check
def packing_keeps_samples_apart(device: str) -> str:
    """Two samples in one row, positions counted anew: the logits that each has alone."""
    lengths = (5, 9)
    ids = torch.randint(128, (1, sum(lengths)), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    with repeatable(device):
        model = tiny(device)
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits.detach()
        alone = [model(input_ids=part, use_cache=False).logits.detach() for part in ids.split(list(lengths), dim=1)]
    assert_sqnr(packed, torch.cat(alone, dim=1), 35.0, "packed")
    return "5 and 9 tokens"


@check
def peft_alone_trains_fused(device: str) -> str:
    """octavo.load and PEFT's own get_peft_model: fused from the first step on, the bits of octavo's get_peft_model, and
    with either kind of checkpointing; inference before it and after the adapters are gone is not touched."""
    ids = torch.randint(128, (2, 13), generator=torch.Generator().manual_seed(1)).to(device)
    with repeatable(device), tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        want = gradients(adapted(load(folder, device=device), device), ids)
        model = adapted(load(folder, device=device), device, peft.get_peft_model)
        with torch.no_grad():
            model(input_ids=ids)
        assert not bound(model), "before training"
        equal(gradients(model, ids), want, "PEFT's own")
        assert bound(model) == 2 * 8, "two layers: norms, q, k, v, o, the MLP, and themselves"
        model.enable_input_require_grads()
        for reentrant in (True, False):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            equal(gradients(model, ids), want, f"use_reentrant={reentrant}")
        said = explain(model).training
        base = model.unload()
        with torch.no_grad():
            base(input_ids=ids)
        assert not bound(base), "after unload()"
    assert torch.device(device).type == "cpu" or said[0].startswith("training: 14 of 14"), said
    return said[0]


def bound(model: nn.Module) -> int:
    return sum(isinstance(module.__dict__.get("forward"), fused._Forward) for module in model.modules())


if __name__ == "__main__":
    raise SystemExit(gpu_check.main(CHECKS, __doc__))
