"""A LoRA step over a Llama-3.1 shape with random weights on one GPU: a line a variant, then JSON.

    python benchmarks/lora_step.py [--shape 8b|70b] [--only NAME ...] [--layers N] [--steps 5] [--profile] [--out FILE]

r=16 on all seven linears, sequence 4096, fused AdamW over float32 adapters, bfloat16 autocast, SDPA. Rivals in the same
run: stock Transformers + PEFT, and the best BF16 we know (Liger, 16-bit adapters, compiled layers). --profile prints
where the GPU's time goes. Random weights have the speed of trained ones. 70b: 80 layers, made as random codes, since
their BF16 would not fit; every, every fourth or no layer runs again in backward.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft import get_peft_model as plain_peft
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo import E4M3, FrozenFloat8Linear, PerRow, Recipe, ScaledTensor, convert
from octavo.integrations.peft import get_peft_model, register
from octavo.workflows.planner.source import published

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEQUENCE, GIB = 4096, 2**30


@dataclass(frozen=True)
class Variant:
    base: str  # bf16 | channel | block128 | codes: random ones, by channel
    micro: int  # sequences a step
    checkpointing: int = 0  # every n-th layer is run again in backward; 0: none
    liger: bool = True
    fused: bool = False
    compiled: bool = False
    wide_adapters: bool = True

    def __str__(self) -> str:
        parts = [self.base, f"{self.micro}x{SEQUENCE}"]
        names = ("checkpointing", "liger", "fused", "compiled", "wide_adapters")
        parts += [name for name in names if getattr(self, name)]
        return " ".join(parts + ([f"every {self.checkpointing}"] if self.checkpointing > 1 else []))


VARIANTS = {
    "stock": Variant("bf16", 4, checkpointing=1, liger=False),
    "best-bf16-2": Variant("bf16", 2, compiled=True, wide_adapters=False),
    "best-bf16-full": Variant("bf16", 4, checkpointing=1, compiled=True, wide_adapters=False),
    "one-by-one-2": Variant("channel", 2),
    "fused-1": Variant("channel", 1, fused=True),
    "fused-2": Variant("channel", 2, fused=True),
    "fused-4": Variant("channel", 4, fused=True),
    "fused-full": Variant("channel", 4, fused=True, checkpointing=1),
    "block-2": Variant("block128", 2, fused=True),
    "block-4": Variant("block128", 4, fused=True),
}
LARGE = {
    "70b": Variant("codes", 1, fused=True),
    "70b-fourth": Variant("codes", 1, fused=True, checkpointing=4),
    "70b-full": Variant("codes", 1, fused=True, checkpointing=1),
}
SHAPES = {"8b": VARIANTS, "70b": LARGE}


def build(variant: Variant, shape: str, layers: int | None) -> nn.Module:
    config = {**published()[f"llama-3.1-{shape}"], "use_cache": False}
    made = AutoConfig.for_model(**config | ({"num_hidden_layers": layers} if layers else {}))
    with torch.device("meta" if variant.base == "codes" else "cuda"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa")
    if variant.base == "codes":
        fill(model, "cuda")
    if variant.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        plain = variant.compiled or variant.fused  # compiled layers and ours bring their own norms and activations
        apply_liger_kernel_to_llama(model=model, swiglu=not plain, rms_norm=not plain)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    if variant.base == "bf16":
        model = plain_peft(model, lora, autocast_adapter_dtype=variant.wide_adapters)
    else:
        adapt = get_peft_model if variant.fused else lambda model, lora: plain_peft(model, register(lora))
        if variant.base != "codes":
            model = convert(
                model, Recipe.named(variant.base, activation="group128" if variant.base == "block128" else "token")
            )
        model = adapt(model, lora)
    if variant.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    for i, layer in enumerate(model.base_model.model.model.layers):
        layer.gradient_checkpointing = variant.checkpointing > 0 and i % variant.checkpointing == 0
        if variant.compiled:
            layer.compile()
    return model.train()


@torch.no_grad()
def fill(model: nn.Module, device: str) -> None:
    """Random FP8 codes in place of the linears of a model without weights, random values in place of the rest."""
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and linear is not model.get_output_embeddings():
            n, k = linear.weight.shape
            codes = torch.randint(256, (n, k), dtype=torch.uint8, device=device)
            codes.masked_fill_(codes & 0x7F == 0x7F, 0)  # NaN
            scale = torch.full((n, 1), 1 / (101 * k**0.5), device=device)  # 101: root mean square of random codes
            q = ScaledTensor(codes, scale, E4M3, PerRow())
            model.set_submodule(name, FrozenFloat8Linear.from_scaled(q, activation="token"))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                wide = torch.randn(parameter.shape, dtype=parameter.dtype, device=device) * 0.02
                module._parameters[name] = nn.Parameter(wide if wide.dim() > 1 else torch.ones_like(wide), False)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def run(variant: Variant, shape: str, layers: int | None, steps: int, profile: bool) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    torch.manual_seed(0)
    row: dict[str, Any] = {"variant": str(variant)}
    try:
        started = time.perf_counter()
        model = build(variant, shape, layers)
        gc.collect()
        torch.cuda.empty_cache()
        row["resident_gib"] = torch.cuda.memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        ids = torch.randint(0, 128000, (variant.micro, SEQUENCE), device="cuda")

        def step() -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=variant.wide_adapters):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        times = [timed(step) for _ in range(steps + 2)]
        median = statistics.median(times[2:])
        row |= {
            "tokens_s": variant.micro * SEQUENCE / median,
            "step_ms": median * 1e3,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "with_state_gib": torch.cuda.memory_allocated() / GIB,
            "loss": float(step()),
            "build_s": time.perf_counter() - started - sum(times),
            "first_s": times[0],
        }
        if profile:
            row["ms"] = profiled(step)
    except torch.OutOfMemoryError:
        row["outcome"] = "out of memory"
    row = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    line = {name: value for name, value in row.items() if name != "ms"}
    print("  ".join(f"{value}" if name == "variant" else f"{name} {value}" for name, value in line.items()), flush=True)
    for name, spent in row.get("ms", {}).items():
        print(f"    {spent:9.2f} ms  {name}")
    return row


def timed(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def profiled(step: Callable[[], object], rows: int = 28) -> dict[str, float]:
    """Milliseconds of GPU time of one step, by kernel; and all of it."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in profile.key_averages():
        spent[f"{event.key[:90]} x{event.count}"] += event.self_device_time_total / 1e3
    found = dict(spent.most_common(rows))
    return {"all kernels": sum(spent.values()), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS, *LARGE], help="default: all of the shape")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    variants = SHAPES[args.shape]
    for name in args.only or variants:
        report["rows"].append(run(variants[name], args.shape, args.layers, args.steps, args.profile))
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
