"""What FP8 products cost a LoRA run: held-out losses beside BF16 runs, gradients beside exact arithmetic.

    python benchmarks/lora_quality.py [--model demo] [--only NAME ...] [--seeds 0 1] [--variants NAME ...] [--out FILE]
    python benchmarks/lora_quality.py --read FILE ... [--svg FILE]     what earlier runs say together, and their curves

Needs torch, Transformers, PEFT and a model folder; on a CPU the fused layers run as their oracle in torch, slowly. A
GPU waits for launches here: run seeds and variants beside each other and read their files together.

curves: LoRA, r=16 on all linears, float32 adapters, BF16 autocast, the same adapters and the same order of data for
    bf16         over the model in BF16
    dequantized  over the FP8 base (channel) decoded to BF16: the oracle
    w8a16        over the FP8 base, inputs as they are
    fused        over the FP8 base, FP8 products forward and backward
    compensated  the same over a base rounded with compensation (octavo calibrate --moments)
    blocks       over the FP8 base in 128 x 128 blocks, inputs rounded per group of 128
    blocks-decoded  over that base decoded to BF16
    blocks-compensated  as blocks, over a base rounded with compensation
  on windows of 512 tokens; each is evaluated as it trains, FP8 products included, and fused ones at the end once more
  with inputs as they are, of all linears and of some: what training lost, and what evaluation does.
gradients: the fused layers of a model that trained a few steps, with the inputs and output gradients that they have
  there, against float32 autograd over the dequantized weights; and how large an error of dA and dB independent
  rounding errors of x make by themselves, which is what the error over BF16 inputs should be.
One JSON line a figure; exit code 1 where one is beyond its limit.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft import get_peft_model as plain_peft
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from curves import figure, oracle_of

from octavo import FrozenFloat8Linear, Recipe, convert, load
from octavo.formats.granularity import PerRow
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.integrations import fused
from octavo.integrations.data import load_data, token_windows
from octavo.integrations.hub import resolve_model
from octavo.integrations.peft import get_peft_model
from octavo.ops.lora import Projection, project

ACTIVATIONS = {"w8a16": "none", "fused": "token", "compensated": "token", "blocks": "group128"}
ACTIVATIONS["blocks-compensated"] = "group128"
VARIANTS = ("bf16", "dequantized", "w8a16", "fused", "compensated", "blocks", "blocks-decoded", "blocks-compensated")
SAME_BASE, BF16_BASE = 0.3, 0.5  # percent of the held-out loss, against BF16 over the same decoded base and over BF16
COSINES = {"product": 0.999, "layer": 0.997}
ERRORS = {"same input": 1e-2, "BF16 input": 4e-2}  # of adapter gradients, relative
WIDE = {  # how trained adapters are judged once more: with 16-bit inputs of the linears with these ends
    "16-bit products": ("_proj",),
    "16-bit inputs of down_proj": ("down_proj",),
    "16-bit inputs in attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONTEXT, RATE, WARMUP = 512, 2e-3, 4


class Lab:
    """The model in BF16 on the device, and windows of text to train and to be judged on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder = resolve_model(args.model)
        self.args, self.device = args, args.device
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16).to(self.device)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        train, held_out = (load_data("demo", split).texts() for split in ("train", "eval"))
        self.train = token_windows(tokenizer, train, args.context, args.windows).to(self.device)
        self.held_out = token_windows(tokenizer, held_out, args.context, args.windows).to(self.device)
        if torch.device(self.device).type == "cpu":
            fused.products_run = lambda shape, device: True  # torch's own product stands in for the tensor cores

    def build(self, variant: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> PeftModel:
        scheme = "block128" if variant.startswith("blocks") else "channel"
        if variant.endswith("compensated"):
            model = copy.deepcopy(self.compensated(scheme))
        else:
            model = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16).to(self.device)
            model.load_state_dict(self.model.state_dict())
        if variant != "bf16" and not variant.endswith("compensated"):
            model = convert(model, Recipe.named(scheme, activation=ACTIVATIONS.get(variant, "none")))
        if variant.endswith(("dequantized", "decoded")):
            decode(model.to(dtype), dtype)
        torch.manual_seed(seed)
        adapt = get_peft_model if variant in ACTIVATIONS else plain_peft
        return adapt(model, LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEARS), task_type="CAUSAL_LM"))

    @cache  # noqa: B019
    def compensated(self, scheme: str) -> nn.Module:
        how: dict[str, Any] = {"rounding": "compensated", "data": "demo", "samples": self.args.calibration}
        model = load(self.folder, Recipe.named(scheme), device=self.device, context=self.args.context, **how)
        print("calibrated", flush=True)
        return model

    def batches(self, seed: int, steps: int) -> Iterator[torch.Tensor]:
        """Whole epochs in a new order each."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            while len(order) < self.args.micro:
                order = torch.cat([order, torch.randperm(len(self.train), generator=generator)])
            yield self.train[order[: self.args.micro].to(self.device)]
            order = order[self.args.micro :]

    def loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    @torch.no_grad()
    def judge(self, model: nn.Module) -> float:
        """Mean held-out loss, nats a token."""
        model.eval()
        parts = self.held_out.split(2 * self.args.micro)
        total = sum(float(self.loss(model, part)) * len(part) for part in parts)
        model.train()
        return total / len(self.held_out)

    def trained(self, variant: str, seed: int, steps: int, see: Callable[[int, PeftModel], None]) -> PeftModel:
        """see: called with the number of steps taken, before the first one and after each."""
        model = self.build(variant, seed).train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)
        see(0, model)
        for step, ids in enumerate(self.batches(seed, steps), 1):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(step / WARMUP, (steps - step + 1) / max(steps - WARMUP, 1))
            self.loss(model, ids).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            see(step, model)
        return model


def decode(model: nn.Module, dtype: torch.dtype) -> None:
    """Every FP8 linear becomes a plain one with the weights that its codes stand for."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FrozenFloat8Linear):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            plain.weight = nn.Parameter(dequantize_ref(module.scaled()).to(dtype), requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)


def curves(lab: Lab) -> Iterator[dict[str, Any]]:
    for seed in lab.args.seeds:
        for variant in lab.args.variants:
            gc.collect()
            points: list[tuple[int, float]] = []
            begin: list[torch.Tensor] = []

            def see(step: int, model: PeftModel, points: Any = points, begin: Any = begin) -> None:
                if not step:
                    begin.extend(p.detach().sum() for p in model.parameters() if p.requires_grad)
                if step % lab.args.every == 0 or step == lab.args.steps:
                    points.append((step, lab.judge(model)))

            started = time.perf_counter()
            model = lab.trained(variant, seed, lab.args.steps, see)
            row = {"part": "curve", "variant": variant, "seed": seed, "held_out": points}
            row |= {"adapters": float(sum(begin)), "seconds": round(time.perf_counter() - started, 1)}
            if ACTIVATIONS.get(variant) in ("token", "group128"):
                row["judged"] = {how: judged_with(lab, model, ends) for how, ends in WIDE.items()}
            yield row


def judged_with(lab: Lab, model: nn.Module, ends: tuple[str, ...]) -> float:
    """The held-out loss with the inputs of the linears with these ends in 16 bit."""
    named = [(name.removesuffix(".base_layer"), module) for name, module in model.named_modules()]
    layers = [m for name, m in named if isinstance(m, FrozenFloat8Linear) and name.endswith(ends)]
    before = [layer.activation for layer in layers]
    for layer in layers:
        layer.activation = "none"
    loss = lab.judge(model)
    for layer, activation in zip(layers, before, strict=True):
        layer.activation = activation
    return loss


def compared(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Final held-out losses, seed by seed, against those of BF16 runs over the same base, decoded, and over BF16."""
    final: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["part"] == "curve":
            final[row["variant"], ""][row["seed"]] = row["held_out"][-1][1]
        for how, loss in row.get("judged", {}).items():
            final[row["variant"], f", {how} to judge"][row["seed"]] = loss
    for (variant, how), losses in final.items():
        for other, limit in ((oracle_of(variant), SAME_BASE), ("bf16", BF16_BASE)):
            others = final.get((other, ""), {})
            seeds = sorted(losses.keys() & others.keys())
            if variant not in (other, oracle_of(variant), "bf16") and seeds:
                gaps = [100 * (losses[seed] / others[seed] - 1) for seed in seeds]
                mean = sum(gaps) / len(gaps)
                row = {"part": "held-out loss", "variant": variant + how, "against": other, "gaps_percent": gaps}
                yield row | {"mean_percent": mean, "limit_percent": limit, "agrees": mean <= limit}


def gradients(lab: Lab) -> Iterator[dict[str, Any]]:
    model = lab.trained("fused", 0, lab.args.warm, lambda step, model: None)
    exact = lab.build("dequantized", 0, torch.float32).float()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    exact.load_state_dict(adapters, strict=False)
    layers, plain = (m.base_model.model.model.layers for m in (model, exact))
    seen = Captured(layers)
    lab.loss(model, lab.train[: lab.args.micro]).backward()
    seen.close()
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for layer, oracle, call in zip(layers, plain, seen.calls, strict=True):
        inner = Captured([oracle.get_submodule(name) for name in names_of(oracle)])
        found["layer"].append(layer_cosines(lab, layer, oracle, call))
        inner.close()
        for name, (arguments, _, dy) in zip(names_of(oracle), inner.calls, strict=True):
            projection = fused.projection_of(layer.get_submodule(name))
            assert projection is not None, name
            found[name.rpartition(".")[2]].append(product_figures(projection, arguments[0], dy))
    for name, rows in found.items():
        worst = {key: (min if key.startswith("cosine") else max)(row[key] for row in rows) for key in rows[0]}
        beyond = {i: row for i, row in enumerate(rows) if not within(name, row)}
        yield {
            "part": "gradients",
            "of": name,
            "layers": len(rows),
            "worst": worst,
            "beyond": beyond,
            "agrees": not beyond,
        }


def within(name: str, figures: dict[str, float]) -> bool:
    least = COSINES["layer" if name == "layer" else "product"]
    return all(
        value >= least if key.startswith("cosine") else value <= ERRORS.get(key.partition(": ")[2], float("inf"))
        for key, value in figures.items()
    )


class Captured:
    """What each module is called with, and the gradient of what it returns: (arguments, keywords, dY) by module."""

    def __init__(self, modules: Any) -> None:
        self.calls: list[Any] = []
        self.hooks = []
        for i, module in enumerate(modules):
            self.calls.append(None)
            self.hooks.append(module.register_forward_hook(self._hook(i), with_kwargs=True))

    def _hook(self, i: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any, out: Any) -> None:
            y = out[0] if isinstance(out, tuple) else out
            self.calls[i] = [tuple(a.detach() for a in arguments), keywords, None]
            y.register_hook(lambda grad: self.calls[i].__setitem__(2, grad.detach()))

        return hook

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def names_of(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_modules() if name.rpartition(".")[2] in LINEARS]


def layer_cosines(lab: Lab, layer: nn.Module, oracle: nn.Module, call: Any) -> dict[str, float]:
    """What the layer adds to the gradient that passes it by, and its adapters' gradients, beside the oracle's."""
    (x, *rest), keywords, dy = call
    results = []
    for module, wide in ((layer, False), (oracle, True)):
        module.zero_grad()
        leaf = (x.float() if wide else x.clone()).requires_grad_()
        with torch.autocast(torch.device(lab.device).type, torch.bfloat16, enabled=not wide):
            out = module(leaf, *rest, **{key: widened(value, wide) for key, value in keywords.items()})
        y = out[0] if isinstance(out, tuple) else out
        y.backward(dy.to(y.dtype))
        grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        results.append((leaf.grad.float() - dy.float(), torch.cat(grads).float()))
    (dx, adapters), (want_dx, want_adapters) = results
    return {"cosine dX": cosine(dx, want_dx), "cosine adapters": cosine(adapters, want_adapters)}


def widened(value: Any, wide: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(widened(v, wide) for v in value)
    return value.float() if wide and isinstance(value, torch.Tensor) and value.is_floating_point() else value


def product_figures(p: Projection, x: torch.Tensor, dy: torch.Tensor) -> dict[str, float]:
    """y and dX of the frozen product against exact ones; dA and dB, relative errors, against PEFT's in float64."""
    assert p.a is not None and p.b is not None
    x, dy = x.bfloat16().requires_grad_(), dy.bfloat16()
    (y,) = project(x, [Projection(p.weight)])
    (dx,) = torch.autograd.grad(y, x, dy)
    a, b = p.a.detach().requires_grad_(), p.b.detach().requires_grad_()
    (with_adapter,) = project(x, [Projection(p.weight, None, a, b, p.scaling)])
    found = torch.autograd.grad(with_adapter, (a, b), dy)
    w, wide_x, wide_dy = (
        dequantize_ref(p.weight).double(),
        x.detach().double().flatten(0, -2),
        dy.double().flatten(0, -2),
    )
    seen = dequantize_ref(quantize_ref(wide_x.float(), E4M3, PerRow())).double()
    figures = {
        "cosine y": cosine(y.detach().flatten(0, -2), wide_x @ w.mT),
        "cosine dX": cosine(dx.flatten(0, -2), wide_dy @ w),
    }
    wide_a, wide_b = a.detach().double(), b.detach().double()
    for name, inputs in (("same input", seen), ("BF16 input", wide_x)):
        low, low_grad = p.scaling * inputs @ wide_a.mT, p.scaling * wide_dy @ wide_b
        for letter, mine, want in (("A", found[0], low_grad.mT @ inputs), ("B", found[1], wide_dy.mT @ low)):
            figures[f"error d{letter}: {name}"] = float((mine.double() - want).norm() / want.norm())
    rounding, low_rounding = seen - wide_x, p.scaling * (seen - wide_x) @ wide_a.mT
    for letter, grad, error, want in (
        ("A", low_grad, rounding, low_grad.mT @ wide_x),
        ("B", wide_dy, low_rounding, wide_dy.mT @ low),
    ):  # errors of tokens add up as squares, however much of the sum itself cancels
        figures[f"rounding alone d{letter}"] = float((grad.norm(dim=1) * error.norm(dim=1)).norm() / want.norm())
    return figures


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def shown(row: dict[str, Any]) -> str:
    """A line for people."""
    mark = "" if row.get("agrees", True) else "   BEYOND"
    if row["part"] == "curve":
        points = row["held_out"]
        return f"{row['variant']:12} seed {row['seed']}  {points[0][1]:.4f} -> {points[-1][1]:.4f}  {row['seconds']} s"
    if row["part"] == "held-out loss":
        gaps = " ".join(f"{gap:+.3f}" for gap in row["gaps_percent"])
        return f"{row['variant']} against {row['against']}: {row['mean_percent']:+.3f} % ({gaps}){mark}"
    lines = [f"{row['of']:10} " + "  ".join(f"{key} {value:.5f}" for key, value in row["worst"].items()) + mark]
    for layer, figures in row.get("beyond", {}).items():
        lines.append(f"  layer {layer}: " + "  ".join(f"{key} {value:.5f}" for key, value in figures.items()))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, or demo: SmolLM2-135M-Instruct")
    parser.add_argument("--only", nargs="*", default=["gradients", "curves"], choices=["gradients", "curves"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--warm", type=int, default=10, help="steps before gradients are compared")
    parser.add_argument("--every", type=int, default=6, help="steps between two points of a curve")
    parser.add_argument("--micro", type=int, default=8, help="windows a step")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--calibration", type=int, default=16, help="windows that compensated rounding is given")
    parser.add_argument("--windows", type=int, help="at most so many of each text")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, nargs="*", default=[])
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args(arguments)
    rows = [json.loads(line) for file in args.read for line in file.read_text().splitlines()]
    rows = [row for row in rows if row["part"] != "held-out loss"]

    def keep(found: Iterable[dict[str, Any]]) -> None:
        for row in found:
            rows.append(row)
            print(shown(row), flush=True)
            if args.out:
                args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))

    if not args.read:
        lab = Lab(args)
        for part in args.only:
            keep({"curves": curves, "gradients": gradients}[part](lab))
    keep(compared(list(rows)))
    print("\n".join(json.dumps(row) for row in rows))
    if args.svg:
        args.svg.write_text(figure([row for row in rows if row["part"] == "curve"], SAME_BASE))
    return 0 if all(row.get("agrees", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
