"""plan: which GPU, how many, which micro-batch, precision and checkpointing, before the money is spent.

Reads config.json or the headers of safetensors files; no weights, no torch, no GPU. How the figures come about:
docs/planner.md.
"""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pydantic

from octavo.base.errors import ConfigError, require_type
from octavo.base.report import Config, atomic_write, read_yaml
from octavo.workflows.planner.config import LARGEST
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.report import PlanReport, Rejection, option
from octavo.workflows.planner.search import Candidate, Limits, Rejected, pareto, per_place, search
from octavo.workflows.planner.setup import Loss, Setup
from octavo.workflows.planner.shapes import FAMILIES
from octavo.workflows.planner.source import hub_id, read_model
from octavo.workflows.planner.tables import GIB, Machine, gpu_named, instances, priced
from octavo.workflows.planner.timing import fp8_shapes

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
COUNTS = (1, 2, 4, 8)  # of GPUs that are not an instance
MOST_SEQUENCES = 65536  # of one optimizer step; each GPU needs one


class PlanConfig(Config):
    """model: a folder, a config.json, a hub id or demo. method: lora, or full (planned, not run by octavo finetune).

    precision: auto tries bf16 and fp8; fp8 keeps the frozen base of LoRA as codes. scheme: of its scales. context:
    tokens of a sequence. batch: sequences of one optimizer step over all GPUs, met exactly. checkpointing: auto tries
    none and full. loss: `tiled`, as the trainer of octavo finetune takes the head; `plain`, all logits at once;
    `liger`. gpu: names; instance: globs such as g7e.*; neither: all instances. max_memory_per_gpu: GiB. budget: USD,
    deadline: hours, both for `tokens` tokens (20M is understood). spot: spot prices instead of on-demand ones. prices:
    YAML of instance type, or of GPU: USD an hour. top: rows. write: where to put the run.yaml that octavo finetune
    takes, with `data` and `out` if they are given.
    """

    model: str
    method: Literal["lora", "full"] = "lora"
    precision: Literal["auto", "bf16", "fp8"] = "auto"
    scheme: Literal["channel", "block128", "tensor"] = "channel"
    rank: int = pydantic.Field(16, ge=1, le=LARGEST)
    target_modules: tuple[str, ...] = ()
    context: int = pydantic.Field(1024, ge=2, le=LARGEST)
    batch: int = pydantic.Field(8, ge=1, le=MOST_SEQUENCES)
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    loss: Loss = "tiled"
    saved_fp8: bool = False
    gpu: tuple[str, ...] = ()
    instance: tuple[str, ...] = ()
    max_memory_per_gpu: float | None = pydantic.Field(None, gt=0)
    max_gpus: int | None = pydantic.Field(None, ge=1, le=MOST_SEQUENCES)
    budget: float | None = pydantic.Field(None, gt=0)
    deadline: float | None = pydantic.Field(None, gt=0)
    spot: bool = False
    prices: Path | None = None
    tokens: int | None = pydantic.Field(None, ge=1, le=10**18)
    order: Literal["cost", "time", "tokens/s"] = "cost"
    top: int = pydantic.Field(10, ge=1)
    data: str | None = None
    out: Path | None = None
    write: Path | None = None

    @pydantic.field_validator("gpu", "instance", "target_modules", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        parts = [value] if isinstance(value, str) else value
        names = tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())
        if parts and not names:
            raise ValueError("it names nothing; leave it out to allow everything")
        return names

    @pydantic.field_validator("tokens", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        text = value.lower() if isinstance(value, str) else ""
        match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmb]?)", text)
        return round(float(match[1]) * _SUFFIX[match[2]]) if match else value

    @pydantic.model_validator(mode="after")
    def _limits_need_a_length(self) -> PlanConfig:
        if (self.budget or self.deadline) and self.tokens is None:
            what = "budget" if self.budget else "deadline"
            raise ConfigError(f"{what} without tokens", fix="Say how long the run is: --tokens 20M.")
        return self


def plan(config: PlanConfig) -> PlanReport:
    """Search and rank; write run.yaml if asked to. ConfigError, CheckpointError: a model or a limit without sense."""
    require_type("plan: config", config, PlanConfig)
    model = read_model(config.model, config.target_modules)
    steps = None if config.tokens is None else math.ceil(config.tokens / (config.batch * config.context))
    most = None if config.max_memory_per_gpu is None else config.max_memory_per_gpu * GIB
    limits = Limits(config.batch, most, config.max_gpus, config.budget, config.deadline, steps)
    found, rejected = search(model, _machines(config), _setups(config), limits, config.scheme)
    found.sort(key=_order(config.order))
    best = found[0] if found else None
    run = _run(config, best, steps)
    report = PlanReport(
        model=config.model,
        parameters=model.parameters,
        by_role=model.by_role,
        from_headers=model.exact,
        trained=model.adapter_parameters(config.rank) if config.method == "lora" else model.parameters,
        method=config.method,
        context=config.context,
        batch=config.batch,
        steps=steps,
        options=[option(one, steps) for one in per_place(found)[: config.top]],
        pareto=[option(one, steps) for one in pareto(found)],
        rejected=[Rejection(where=r.where, what=r.what, reason=r.reason) for r in rejected],
        notes=_notes(config, model, found, rejected),
        run=run,
        command=_command(config) if run else None,
    )
    if config.write is not None:
        write_run(config.write, report)
    return report


def write_run(path: Path, report: PlanReport) -> None:
    """The run.yaml of a report's first option. ConfigError where there is none that octavo finetune can run."""
    if report.run is None:
        why = report.notes[-1] if report.options else report.rejected[0].reason if report.rejected else "no machine"
        raise ConfigError(f"{path}: there is nothing that octavo finetune could run", got=why)
    import yaml

    one = report.options[0]
    low, high = one.memory_range_gib
    head = (
        f"# octavo plan: {one.where}; predicted {one.memory_gib:.1f} GiB ({low:.1f} to {high:.1f}) of "
        f"{one.usable_gib:.1f}, {one.seconds_per_step:.3g} s a step\n# {report.command}\n"
    )
    atomic_write(path, (head + yaml.safe_dump(report.run, sort_keys=False, allow_unicode=True)).encode())


def _machines(config: PlanConfig) -> list[Machine]:
    prices = _prices(config.prices) if config.prices else {}
    names = [gpu_named(name) for name in config.gpu]
    if config.gpu and not config.instance:
        counts = [n for n in COUNTS if n <= (config.max_gpus or COUNTS[-1])]
        each = [(gpu, prices.get(gpu.name)) for gpu in names]
        return [
            Machine("", gpu, count, price=None if usd is None else usd * count) for gpu, usd in each for count in counts
        ]
    found = instances(config.instance, config.spot, prices)
    kept = [machine for machine in found if not names or machine.gpu in names]
    if not kept:
        have = ", ".join(dict.fromkeys(machine.gpu.name for machine in found))
        raise ConfigError(
            f"no such instance has {', '.join(config.gpu)}", got=have, fix="Leave --instance or --gpu out."
        )
    return kept


def _prices(path: Path) -> dict[str, float]:
    """Instance type or GPU -> USD an hour. ConfigError for what is no price, and for a price of nothing known."""
    found = read_yaml(path)
    for name, price in found.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
            raise ConfigError(f"{path}: {name}", got=repr(price), need="USD an hour, above 0")
    return {priced(name): float(price) for name, price in found.items()}


def _setups(config: PlanConfig) -> list[Setup]:
    precisions = ("bf16", "fp8") if config.precision == "auto" else (config.precision,)
    modes = ("none", "full") if config.checkpointing == "auto" else (config.checkpointing,)
    return [
        Setup(
            method=config.method,
            precision=precision,
            rank=config.rank,
            context=config.context,
            checkpointing=mode,  # type: ignore[arg-type]
            loss=config.loss,
            fused_layers=config.loss == "liger",
            saved_fp8=config.saved_fp8 and precision == "fp8" and config.method == "lora",
        )
        for precision, mode in product(precisions, modes)
    ]


def _order(by: str) -> Any:
    def key(one: Candidate) -> tuple[float, ...]:
        cost = one.cost(1)
        unknown = float("inf") if cost is None else cost
        return (unknown, one.time.seconds) if by == "cost" else (one.time.seconds, unknown)

    return key


def _run(config: PlanConfig, best: Candidate | None, steps: int | None) -> dict[str, Any] | None:
    """Settings of octavo finetune: its names, nothing else."""
    if best is None or why_not(config, best.setup.world):
        return None
    values: dict[str, Any] = {
        "model": hub_id(config.model),
        "data": config.data,
        "out": None if config.out is None else str(config.out),
        "mode": "lora" if best.setup.precision == "fp8" else "two-stage",
        "scheme": best.scheme,
        "activation": "token" if best.setup.saved_fp8 else None,
        "rank": config.rank,
        "alpha": 2 * config.rank,
        "target_modules": list(config.target_modules) or None,
        "context": config.context,
        "micro_batch": best.setup.micro,
        "accumulation": best.setup.accumulation,
        "checkpointing": best.setup.checkpointing,
        "max_steps": steps,
    }
    return {name: value for name, value in values.items() if value is not None}


def why_not(config: PlanConfig, gpus: int = 1) -> str:
    """What octavo finetune does not run yet, or nothing."""
    cannot = {
        "method full": config.method == "full",
        f"loss {config.loss}": config.loss != "tiled",
        "several GPUs: plan with --max-gpus 1": gpus > 1,
    }
    return next((name for name, true in cannot.items() if true), "")


def _command(config: PlanConfig) -> str:
    missing = " ".join(f"--{name} {name.upper()}" for name in ("data", "out") if getattr(config, name) is None)
    return f"octavo finetune {config.write or 'run.yaml'} {missing}".strip()


def _notes(config: PlanConfig, model: Model, found: list[Candidate], rejected: list[Rejected]) -> list[str]:
    notes = []
    if model.longest and config.context > model.longest:
        notes.append(f"context {config.context} is longer than the {model.longest} tokens the model was made for")
    if config.precision != "bf16" and (odd := fp8_shapes(model, config.scheme)):
        notes.append(f"FP8 products cannot take {'; '.join(odd[:3])}: these layers run in 16 bit")
    if (kind := str(model.text.get("model_type"))) not in FAMILIES:
        notes.append(f"activations of '{kind}' are unknown and counted as those of a Llama of these sizes: try --trial")
    if "tower" in model.by_role:
        notes.append("the vision tower is counted as frozen weights; activations are those of text")
    best = found[0] if found else None
    logits = best.memory.terms.get("logits", 0.0) if best else 0.0
    too_large = any("mostly logits" in r.reason for r in rejected)
    if config.loss == "plain" and (too_large or (best and logits > 0.25 * best.memory.peak)):
        notes.append("logits dominate the memory: a fused cross-entropy (--loss tiled or liger) removes them")
    if config.spot and not any(one.price is not None for one in found):
        notes.append("spot prices change by the hour and are not in the table: give them with --prices")
    if best and (why := why_not(config, best.setup.world)):
        notes.append(f"no run.yaml: octavo finetune does not run {why}")
    return notes
