"""A LoRA step over a Llama-3.1 shape with random weights on one GPU: a line a variant, then JSON.

    python benchmarks/lora_step.py [--shape 8b|70b] [--only NAME[:ATTENTION] ...] [--layers N] [--steps 5] [--profile]
        [--out FILE] [--traces FOLDER] [--attention NAME]

r=16 on all seven linears, sequence 4096, fused AdamW over float32 adapters, bfloat16 autocast, SDPA. Rivals in the same
run: stock Transformers + PEFT, which multiplies float32 adapters in float32 (or under autocast), and the best BF16 we
know (Liger, 16-bit adapters, compiled layers).

step_ms: the median of steps each waited for. in_a_row_ms: of steps waited for once at the end, with NVML's utilisation,
tensor-active share, clock and power meanwhile. host_ms: until such a step's Python is done. busy: the share of the time
between the first and the last kernel of a step in which one runs. --profile prints where the GPU's time goes, between
which kernels it has nothing to do, and what the host does (--traces FOLDER: as JSON for Perfetto).

Random weights have the speed of trained ones. 70b: 80 layers, made as random codes, since their BF16 would not fit;
every, every fourth or no layer runs again in backward; fused-half: every second.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from peft import LoraConfig
from peft import get_peft_model as plain_peft
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo import E4M3, FrozenFloat8Linear, PerRow, Recipe, ScaledTensor, convert
from octavo.integrations.peft import get_peft_model, register
from octavo.workflows.measures.timing import seconds
from octavo.workflows.planner.source import published

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEQUENCE, GIB = 4096, 2**30
RECIPES = {
    "channel": Recipe.named("channel", activation="token"),
    "block128": Recipe.named("block128", activation="group128"),
    "po2": Recipe.named("block128", activation="token", scale_format="po2"),
}


@dataclass(frozen=True)
class Variant:
    base: (
        str  # bf16 | channel | block128 | po2: block128, scales powers of two, as rows | codes: random ones, by channel
    )
    micro: int  # sequences a step
    checkpointing: int = 0  # every n-th layer is run again in backward; 0: none
    selective: bool = False  # not its attention, where that is one of torch's
    liger: bool = True
    fused: bool = False
    compiled: bool = False
    wide_adapters: bool = True
    autocast: bool = True
    dropout: float = 0.0

    def __str__(self) -> str:
        parts = [self.base, f"{self.micro}x{SEQUENCE}"]
        names = ("checkpointing", "selective", "liger", "fused", "compiled", "wide_adapters", "autocast")
        parts += [name for name in names if getattr(self, name)]
        parts += [f"dropout {self.dropout:g}"] if self.dropout else []
        return " ".join(parts + ([f"every {self.checkpointing}"] if self.checkpointing > 1 else []))


VARIANTS = {
    "stock": Variant("bf16", 4, checkpointing=1, liger=False, autocast=False),
    "stock-autocast": Variant("bf16", 4, checkpointing=1, liger=False),
    "best-bf16-2": Variant("bf16", 2, compiled=True, wide_adapters=False),
    "best-bf16-full": Variant("bf16", 4, checkpointing=1, compiled=True, wide_adapters=False),
    "one-by-one-2": Variant("channel", 2),
    "fused-1": Variant("channel", 1, fused=True),
    "fused-2": Variant("channel", 2, fused=True),
    "fused-4": Variant("channel", 4, fused=True),
    "fused-dropout": Variant("channel", 4, fused=True, dropout=0.05),
    "one-by-one-dropout": Variant("channel", 2, dropout=0.05),
    "fused-half": Variant("channel", 4, fused=True, checkpointing=2),
    "fused-selective": Variant("channel", 4, fused=True, checkpointing=1, selective=True),
    "fused-full": Variant("channel", 4, fused=True, checkpointing=1),
    "block-2": Variant("block128", 2, fused=True),
    "block-4": Variant("block128", 4, fused=True),
    "block-po2-4": Variant("po2", 4, fused=True),
}
LARGE = {
    "70b": Variant("codes", 1, fused=True),
    "70b-fourth": Variant("codes", 1, fused=True, checkpointing=4),
    "70b-full": Variant("codes", 1, fused=True, checkpointing=1),
}
SHAPES = {"8b": VARIANTS, "70b": LARGE}


def build(variant: Variant, shape: str, layers: int | None, attention: str) -> nn.Module:
    config = {**published()[f"llama-3.1-{shape}"], "use_cache": False}
    made = AutoConfig.for_model(**config | ({"num_hidden_layers": layers} if layers else {}))
    with torch.device("meta" if variant.base == "codes" else "cuda"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation=attention)
    if variant.base == "codes":
        fill(model, "cuda")
    if variant.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        plain = variant.compiled or variant.fused  # compiled layers and ours bring their own norms and activations
        apply_liger_kernel_to_llama(model=model, swiglu=not plain, rms_norm=not plain)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=variant.dropout, target_modules=TARGETS, task_type="CAUSAL_LM")
    if variant.base == "bf16":
        model = plain_peft(model, lora, autocast_adapter_dtype=variant.wide_adapters)
    else:
        adapt = get_peft_model if variant.fused else lambda model, lora: plain_peft(model, register(lora))
        if variant.base != "codes":
            model = convert(model, RECIPES[variant.base])
        for module in model.modules() if variant.base == "po2" else ():
            if isinstance(module, FrozenFloat8Linear):
                module.to_rows()
        model = adapt(model, lora)
    if variant.checkpointing:
        ways = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if variant.selective else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **ways})
        model.enable_input_require_grads()
    for i, layer in enumerate(model.base_model.model.model.layers):
        layer.gradient_checkpointing = variant.checkpointing > 0 and i % variant.checkpointing == 0
        if variant.compiled:
            layer.compile()
    return model.train()


def policy(context: object, op: object, *args: object, **options: object) -> CheckpointPolicy:
    """Keeps what attention returns, and runs the rest again."""
    kept = torch.ops.aten._scaled_dot_product_cudnn_attention, torch.ops.aten._scaled_dot_product_flash_attention
    save = op in [packet.default for packet in kept]
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


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


def run(asked: str, args: argparse.Namespace) -> dict[str, Any]:
    shape, layers, steps, profile, traces = args.shape, args.layers, args.steps, args.profile, args.traces
    name, _, attention = asked.partition(":")
    variant, attention = SHAPES[shape][name], attention or args.attention
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    torch.manual_seed(0)
    row: dict[str, Any] = {"variant": f"{variant} {attention}"}
    try:
        started = time.perf_counter()
        model = build(variant, shape, layers, attention)
        gc.collect()
        torch.cuda.empty_cache()
        row["resident_gib"] = torch.cuda.memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        ids = torch.randint(0, 128000, (variant.micro, SEQUENCE), device="cuda")

        def step() -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=variant.wide_adapters and variant.autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        times = [seconds(step) for _ in range(steps + 2)]
        median = statistics.median(times[2:])
        row |= {
            "tokens_s": variant.micro * SEQUENCE / median,
            "step_ms": median * 1e3,
            **in_a_row(step, steps),
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "with_state_gib": torch.cuda.memory_allocated() / GIB,
            "loss": float(step()),
            "build_s": time.perf_counter() - started - sum(times),
            "first_s": times[0],
        }
        busy, spent, idle = profiled(step)
        row |= {"busy": busy} | ({"ms": spent, "idle_ms": idle} if profile else {})
        if profile:
            row["host"] = host_profile(step, traces and traces / f"{name}.json.gz")
    except torch.OutOfMemoryError:
        row["outcome"] = "out of memory"
    row = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
    line = {key: value for key, value in row.items() if not isinstance(value, dict)}
    print("  ".join(f"{value}" if key == "variant" else f"{key} {value}" for key, value in line.items()), flush=True)
    for table in ("ms", "idle_ms", "host"):
        for key, value in row.get(table, {}).items():
            print(f"    {value:9.2f} ms  {table if table != 'ms' else ''} {key}")
    return row


def in_a_row(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Of steps that nothing waits for: milliseconds a step, also of the host, and what NVML says of the GPU."""
    watch = Watch()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    return {"in_a_row_ms": took / steps * 1e3, "host_ms": host / steps * 1e3, **watch.stop()}


class Watch:
    """NVML between now and `stop`: percent of time with a kernel and with tensor cores at work, MHz, watts."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self.nvml, self.done, self.seen = pynvml, Event(), list[tuple[float, ...]]()
        self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
        try:
            self.gpm = bool(pynvml.nvmlGpmQueryDeviceSupport(self.device).isSupportedDevice)
        except pynvml.NVMLError:
            self.gpm = False
        self.before = self._sample() if self.gpm else None
        self.thread = Thread(target=self._look, daemon=True)
        self.thread.start()

    def _sample(self) -> Any:
        sample = self.nvml.nvmlGpmSampleAlloc()
        self.nvml.nvmlGpmSampleGet(self.device, sample)
        return sample

    def _look(self) -> None:
        nvml, device = self.nvml, self.device
        while not self.done.wait(0.4):  # its calls hold up launches
            use = nvml.nvmlDeviceGetUtilizationRates(device).gpu
            clock = nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)
            self.seen.append((use, clock, nvml.nvmlDeviceGetPowerUsage(device) / 1e3))

    def stop(self) -> dict[str, float]:
        self.done.set()
        self.thread.join()
        means = [statistics.mean(values) for values in zip(*self.seen, strict=True)]
        found = dict(zip(("utilisation", "mhz", "watts"), means, strict=False))
        if self.gpm:
            asked = self.nvml.c_nvmlGpmMetricsGet_t()
            ids = {
                "sm_active": self.nvml.NVML_GPM_METRIC_SM_UTIL,
                "tensor_active": self.nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            }
            asked.version, asked.numMetrics = self.nvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
            asked.sample1, asked.sample2 = self.before, self._sample()
            for i, metric in enumerate(ids.values()):
                asked.metrics[i].metricId = metric
            self.nvml.nvmlGpmMetricsGet(asked)
            found |= {name: asked.metrics[i].value for i, name in enumerate(ids)}
        return found


def profiled(step: Callable[[], object], rows: int = 40) -> tuple[float, dict[str, float], dict[str, float]]:
    """Of one step's kernels: the share of time in which one runs, milliseconds by name, and between which none runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    raw = profile.profiler.kineto_results.events()
    on_gpu = [event for event in raw if event.device_type() == torch.autograd.DeviceType.CUDA]
    events = sorted((event.start_ns(), event.duration_ns(), event.name()) for event in on_gpu)
    spent, idle, count = Counter[str](), Counter[str](), Counter[str]()
    end, last = events[0][0], ""
    for start, took, name in events:
        spent[name] += took
        count[name] += 1
        if start > end:
            idle[f"{last[:40]} -> {name[:40]}"] += start - end
        if start + took > end:
            end, last = start + took, name
    whole, nothing = end - events[0][0], sum(idle.values())
    found = {f"{name[:90]} x{count[name]}": value / 1e6 for name, value in spent.most_common(rows)}
    totals = {f"all kernels x{len(events)}": sum(spent.values()) / 1e6}
    gaps = {name: value / 1e6 for name, value in idle.most_common(12)}
    return 1 - nothing / whole, totals | found, {"all": nothing / 1e6} | gaps


def host_profile(step: Callable[[], object], trace: Path | None) -> dict[str, float]:
    """Milliseconds of Python by function, most expensive first, of one step; the profiler's own cost is in them."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # backward where the profiler looks
        profile.enable()
        step()
        profile.disable()
    torch.cuda.synchronize()
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as traced:
            step()
            torch.cuda.synchronize()
        traced.export_chrome_trace(str(trace))
    found: dict[str, float] = {}
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():
        found[f"{'/'.join(Path(file).parts[-2:])}:{line} {name} x{calls}"] = own * 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1])[:45])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    names = ", ".join([*VARIANTS, *LARGE])
    parser.add_argument("--only", nargs="*", metavar="NAME[:ATTENTION]", help=f"default: all of the shape; {names}")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--attention", default="sdpa", help="of Transformers, flash_attention_4 for example")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    variants = SHAPES[args.shape]
    if unknown := [asked for asked in args.only or () if asked.partition(":")[0] not in variants]:
        parser.error(f"not of this shape: {', '.join(unknown)}")
    for asked in args.only or variants:
        report["rows"].append(run(asked, args))
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
