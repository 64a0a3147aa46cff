"""Predicted against measured: peak reserved memory and seconds of a step over 28 settings on one GPU.

    python benchmarks/planner.py [--seconds 450] [--out FILE]     on a GPU; 1B and 8B shapes, 2 minutes on an H200
    python benchmarks/planner.py --device cpu                     a dry run of the same settings on tiny shapes
    python benchmarks/planner.py --summary FILE                   of rows that were measured before

Models have the published shapes and random weights. A step is that of octavo finetune: 16-bit autocast, float32
adapters or master weights, fused AdamW, growing segments of the allocator, TRL's head in tiles (where TRL is not
installed, Transformers' plain loss; the row says which). Every second setting of a shape is set aside (`held_out`)
before any constant is fitted; the summary has the errors of both halves. Settings that run out of memory count against
a plan that said they fit. A table for people; JSON lines in FILE.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

# As octavo finetune has it, before torch is there; the user's own setting stays.
os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from octavo import Float8Linear, Recipe, convert, why
from octavo.base.allocator import expandable_segments, setting
from octavo.base.errors import ConfigError
from octavo.base.oom import out_of_memory
from octavo.integrations.peft import get_peft_model, lora_config
from octavo.workflows.planner.memory import memory
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.search import USABLE
from octavo.workflows.planner.setup import Loss, Setup
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

        before = dict(vars(modeling_llama))
        apply_liger_kernel_to_llama(model=model)
        RESTORE.append(lambda: vars(modeling_llama).update(before))  # Liger replaces classes and functions for all
    elif add_fused_lm_head := tiled_head():
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
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


@cache
def tiled_head() -> Callable[..., None] | None:
    """The head of octavo finetune's trainer, None where TRL is not installed."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        return None
    return add_fused_lm_head  # type: ignore[no-any-return]


def loss_of(case: Case) -> Loss:
    return "liger" if case.liger else "tiled" if tiled_head() else "plain"


def steps(model: nn.Module, case: Case, vocab: int, context: int, device: str) -> float:
    """Median seconds of an optimizer step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(vocab, (case.micro, context), device=device)
    head = {"fused_lm_head": True} if loss_of(case) == "tiled" else {}
    times = []
    for _ in range(STEPS + 1):
        synchronize(device)
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=ids, labels=ids, **head).loss
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
    reserved, seconds, verdict = predict(case, config, context, device, gpu)
    row = dict(vars(case)) | {
        "context": context,
        "loss": loss_of(case),
        "predicted_gib": reserved / GIB,
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
        loss=loss_of(case),
        fused_layers=case.liger,
        width=4 if device == "cpu" else 2,
        backend=why("quantize" if case.method == "full" else "linear", m=case.micro * context, device=device).backend,
        expandable=expandable_segments(),
        evaluates=False,
    )
    model = Model.from_config(case.shape, config)
    account = memory(model, setup)
    if gpu is None:
        return account.reserved, None, None
    seconds = step_time(model, setup, Machine("", gpu, 1)).seconds
    return account.reserved, seconds, account.high <= gpu.memory * USABLE


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of both halves, in percent."""
    found: dict[str, Any] = {
        "fits_that_ran_out": sum(r["fits"] is True and r["outcome"] == "out of memory" for r in rows)
    }
    found["measured"] = sum(r["outcome"] == "ok" for r in rows)
    for what in ("memory", "time"):
        known = [r for r in rows if r.get(f"{what}_error") is not None]
        for half in (False, True):
            errors = [abs(r[f"{what}_error"]) for r in known if r["held_out"] == half]
            if errors:
                name = f"{what}_{'held_out' if half else 'fit'}"
                found[name] = {"mean_%": 100 * statistics.mean(errors), "worst_%": 100 * max(errors), "n": len(errors)}
    return found


def planning_seconds() -> float:
    """`octavo plan` of Llama-3.1-8B over all instances, the whole process."""
    command = [sys.executable, "-m", "octavo", "plan", "Llama-3.1-8B", "--context", "4096", "--json"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])
    return time.perf_counter() - started


HEADER = "shape        how        tokens   ckpt loss  held    GiB predicted error    used       s predicted error"


def line(row: dict[str, Any]) -> str:
    """A row in at most 110 columns."""
    name = f"{row['shape']:12} {row['method']:4} {row['precision']:4} {row['context']:>6}x{row['micro']} "
    name += f"{row['checkpointing']:4} {row['loss']:5} {'yes' if row['held_out'] else '-':4}"
    if row["outcome"] != "ok":
        return f"{name} {row['outcome'][:50]}"
    memory = "      -         -     -       -"
    if "measured_gib" in row:
        memory = f"{row['measured_gib']:7.2f} {row['predicted_gib']:9.2f} {row['memory_error']:+6.1%} "
        memory += f"{row['allocated_gib']:7.2f}"
    predicted, error = row["predicted_s"], row["time_error"]
    time = f"{row['measured_s']:8.4f} " + ("        -     -" if error is None else f"{predicted:9.4f} {error:+6.1%}")
    return f"{name} {memory} {time}"


def write(row: dict[str, Any], out: Path | None) -> None:
    """One JSON line into the file."""
    if out:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=450.0, help="no setting starts after this")
    parser.add_argument("--skip", type=int, default=0, help="settings at the beginning that are left out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--summary", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.summary:
        print(
            json.dumps(summary([json.loads(row) for row in options.summary.read_text(encoding="utf-8").splitlines()]))
        )
        return 0
    torch.manual_seed(0)
    started, name = time.monotonic(), "cpu"
    gpu = None
    if options.device == "cuda":
        name = torch.cuda.get_device_name()
        try:
            gpu = gpu_named(name.split(" ")[1] if name.startswith("NVIDIA ") else name)
        except ConfigError as error:
            print(f"{name}: {error}; times are not predicted", file=sys.stderr)
    facts = {"device": name, "torch": torch.__version__, "allocator": setting(), "planning_s": planning_seconds()}
    if options.device == "cuda":
        torch.zeros(1, device="cuda")
        facts["expandable_segments"] = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    write(facts, options.out)
    print(facts, HEADER, sep="\n", flush=True)
    rows = []
    for case in list(cases())[options.skip :]:
        if time.monotonic() - started > options.seconds:
            row = dict(vars(case)) | {"loss": loss_of(case), "outcome": "not run: time is up"}
        else:
            row = measure(case, options.device, gpu, tiny=options.device == "cpu")
            rows.append(row)
        write(row, options.out)
        print(line(row), flush=True)
    found = {"summary": summary(rows), "wall_s": time.monotonic() - started}
    write(found, options.out)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
