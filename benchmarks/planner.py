"""Predicted against measured: peak reserved memory and seconds of a step over 28 settings on one GPU. JSON lines.

    python benchmarks/planner.py [--seconds 450] [--out FILE]     on a GPU; 1B and 8B shapes, about 8 minutes on an H200
    python benchmarks/planner.py --device cpu                     a dry run of the same settings on tiny shapes

Models have the published shapes and random weights. A step is that of octavo finetune: 16-bit autocast, float32
adapters or master weights, fused AdamW. Every second setting of a shape is set aside (`held_out`) before any constant
is fitted. The summary has the errors of both halves, and those of the held-out half with one factor each for memory
and time, the medians of the other half. Settings that run out of memory count against a plan that said they fit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo import Float8Linear, Recipe, convert
from octavo.base.errors import ConfigError
from octavo.base.oom import out_of_memory
from octavo.integrations.peft import get_peft_model, lora_config
from octavo.workflows.planner.memory import Setup, memory
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.search import USABLE, octavo_arithmetic
from octavo.workflows.planner.source import published
from octavo.workflows.planner.tables import GIB, Gpu, Machine, gpu_named
from octavo.workflows.planner.timing import step_time

STEPS = 3  # timed ones, after one that warms up and makes the optimizer's state
RESTORE: list[Callable[[], None]] = []  # what the end of a case puts back
TINY = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048}


@dataclass(frozen=True)
class Case:
    shape: str
    method: str
    precision: str
    context: int
    micro: int
    checkpointing: str
    liger: bool
    held_out: bool


def cases() -> Iterator[Case]:
    """Shape, method, precision, context x micro-batch, checkpointing, Liger; small and large take turns."""
    one = """
        lora bf16 1024x4 none -; lora bf16 4096x2 full -; lora bf16 16384x1 full liger; lora bf16 4096x2 none liger;
        lora fp8 1024x4 none -; lora fp8 4096x2 full liger; lora fp8 16384x1 full -; lora fp8 4096x1 none liger;
        full bf16 1024x4 none -; full bf16 4096x2 full -; full bf16 4096x2 none liger; full bf16 16384x1 full liger;
        full fp8 1024x4 full -; full fp8 2048x1 none liger"""
    eight = """
        lora bf16 1024x4 full -; lora bf16 1024x1 none -; lora bf16 4096x1 none liger; lora bf16 4096x4 full liger;
        lora bf16 4096x2 full -; lora bf16 16384x1 full liger; lora fp8 1024x2 none -; lora fp8 1024x4 full liger;
        lora fp8 4096x1 none liger; lora fp8 4096x2 full -; lora fp8 16384x1 full liger; lora bf16 2048x4 full liger;
        lora fp8 2048x2 none liger; lora fp8 4096x4 full liger"""
    for index, pair in enumerate(zip(one.split(";"), eight.split(";"), strict=True)):
        for shape, line in zip(("Llama-3.2-1B", "Llama-3.1-8B"), pair, strict=True):
            method, precision, size, checkpointing, liger = line.split()
            context, micro = map(int, size.split("x"))
            yield Case(shape, method, precision, context, micro, checkpointing, liger == "liger", index % 2 == 1)


def config_of(case: Case, tiny: bool) -> dict[str, Any]:
    config = published()[case.shape.lower()]
    return {**config, **(TINY if tiny else {}), "max_position_embeddings": 16384}


def build(case: Case, config: dict[str, Any], device: str) -> nn.Module:
    """The model of a case, ready to train, on the device."""
    wide = torch.float32 if case.method == "full" or device == "cpu" else torch.bfloat16
    made = AutoConfig.for_model(**config)
    made.use_cache = False
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=wide, attn_implementation="sdpa")
    if case.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        rotary = modeling_llama.apply_rotary_pos_emb
        apply_liger_kernel_to_llama(model=model)
        RESTORE.append(lambda: setattr(modeling_llama, "apply_rotary_pos_emb", rotary))  # Liger replaces it for all
    if case.method == "full":
        if case.precision == "fp8":
            for name, module in list(model.model.layers.named_modules()):
                if type(module) is nn.Linear:
                    model.model.layers.set_submodule(name, Float8Linear.from_linear(module))
    else:
        if case.precision == "fp8":
            model = convert(model, Recipe.named("channel", activation="none"))
        model = get_peft_model(model, lora_config(model, rank=16, alpha=32))
    if case.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def steps(model: nn.Module, case: Case, vocab: int, context: int, device: str) -> float:
    """Median seconds of an optimizer step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(vocab, (case.micro, context), device=device)
    times = []
    for _ in range(STEPS + 1):
        synchronize(device)
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def clean(device: str) -> None:
    """Free everything and start counting."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(case: Case, device: str, gpu: Gpu | None, tiny: bool) -> dict[str, Any]:
    config = config_of(case, tiny)
    context = max(32, case.context // 64) if tiny else case.context
    account, seconds, verdict = predict(case, config, context, device, gpu)
    row = dict(vars(case)) | {
        "context": context,
        "predicted_gib": account / GIB,
        "predicted_s": seconds,
        "fits": verdict,
    }
    clean(device)
    started = time.monotonic()
    try:
        model = build(case, config, device)
        clean(device)  # building takes more for a moment: its peak does not count
        row["measured_s"] = steps(model, case, config["vocab_size"], context, device)
        row["outcome"] = "ok"
    except ImportError as error:
        return row | {"outcome": f"skipped: {error}"}
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        return row | {"outcome": "out of memory"}
    finally:
        while RESTORE:
            RESTORE.pop()()
    if device != "cpu":  # the allocator of a CPU says nothing about peaks
        row["measured_gib"] = torch.cuda.max_memory_reserved() / GIB
        row["memory_error"] = row["predicted_gib"] / row["measured_gib"] - 1
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["alloc_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    row["time_error"] = None if seconds is None else seconds / row["measured_s"] - 1
    return row | {"wall_s": round(time.monotonic() - started, 2)}


def predict(
    case: Case, config: dict[str, Any], context: int, device: str, gpu: Gpu | None
) -> tuple[float, float | None, bool | None]:
    """Reserved bytes, seconds where the GPU is known, and whether the plan would say that it fits."""
    setup = Setup(
        method=case.method,
        precision=case.precision,
        context=context,
        micro=case.micro,
        checkpointing=case.checkpointing,  # type: ignore[arg-type]
        fused_loss=case.liger,
        fused_layers=case.liger,
        width=4 if device == "cpu" else 2,
    )
    model = Model.from_config(case.shape, config)
    account = memory(model, setup)
    if gpu is None:
        return account.peak - account.outside, None, None
    fp8 = case.precision == "fp8" and octavo_arithmetic(gpu, "channel")[0] == "fp8"
    seconds = step_time(model, setup, Machine("", gpu, 1), 1, fp8=fp8).seconds
    return account.peak - account.outside, seconds, account.high <= gpu.memory * USABLE


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of both halves, in percent, and of the held-out half with the other half's median factors."""
    found: dict[str, Any] = {
        "fits_that_ran_out": sum(r["fits"] is True and r["outcome"] == "out of memory" for r in rows)
    }
    found["measured"] = sum(r["outcome"] == "ok" for r in rows)
    for what, unit in (("memory", "gib"), ("time", "s")):
        known = [r for r in rows if r.get(f"{what}_error") is not None]
        fit = [r for r in known if not r["held_out"]]
        if not fit:
            continue
        factor = statistics.median(r[f"measured_{unit}"] / r[f"predicted_{unit}"] for r in fit)
        for half, scale in itertools.product((False, True), (1.0, factor)):
            name = f"{what}_{'held_out' if half else 'fit'}" + ("" if scale == 1.0 else "_with_factor")
            errors = [abs(scale * (r[f"{what}_error"] + 1) - 1) for r in known if r["held_out"] == half]
            if errors:
                found[name] = {"mean_%": 100 * statistics.mean(errors), "worst_%": 100 * max(errors), "n": len(errors)}
        found[f"{what}_factor"] = factor
    return found


def planning_seconds() -> float:
    """`octavo plan` of Llama-3.1-8B over all instances, the whole process."""
    command = [sys.executable, "-m", "octavo", "plan", "Llama-3.1-8B", "--context", "4096", "--json"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])
    return time.perf_counter() - started


def show(row: dict[str, Any], out: Path | None) -> None:
    line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    print(line, flush=True)
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=450.0, help="no setting starts after this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    started, name = time.monotonic(), "cpu"
    gpu = None
    if options.device == "cuda":
        name = torch.cuda.get_device_name()
        try:
            gpu = gpu_named(name.split(" ")[1] if name.startswith("NVIDIA ") else name)
        except ConfigError as error:
            print(f"{name}: {error}; times are not predicted", file=sys.stderr)
    show({"device": name, "torch": torch.__version__, "planning_s": planning_seconds()}, options.out)
    rows = []
    for case in cases():
        if time.monotonic() - started > options.seconds:
            show(dict(vars(case)) | {"outcome": "not run: time is up"}, options.out)
            continue
        rows.append(measure(case, options.device, gpu, tiny=options.device == "cpu"))
        show(rows[-1], options.out)
    show({"summary": summary(rows), "wall_s": time.monotonic() - started}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
