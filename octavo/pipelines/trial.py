"""plan --trial: real steps of octavo finetune on this machine, until the plan is confirmed or corrected.

A candidate is one micro-batch, run in processes of its own with a time limit: at least three optimizer steps with full
accumulation on samples of full length, one evaluation before and after, one snapshot. Binary search over the
micro-batches that give the batch exactly; what runs out of memory, or only just does not, is too large.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.base.allocator import expandable_segments, setting
from octavo.base.errors import RefusedError, UnsupportedError
from octavo.base.log import logger
from octavo.pipelines.trial_process import Ended, run_group
from octavo.pipelines.trial_report import TrialReport, Tried
from octavo.workflows.plan import PlanConfig, why_not
from octavo.workflows.planner.memory import memory
from octavo.workflows.planner.report import PlanReport
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.source import read_model
from octavo.workflows.planner.tables import GIB

STEPS = 3  # optimizer states appear in the first step, their temporaries and a full allocator cache after it
TOO_LARGE = frozenset({"out of memory", "thrashing"})
Runner = Callable[[dict[str, Any], int, float], Ended]


def trial(
    config: PlanConfig,
    report: PlanReport,
    *,
    seconds: float,
    processes: int,
    device: str | None,
    run: Runner | None = None,
) -> TrialReport:
    """Try the settings of the plan's run. run: how a candidate is run, for tests.

    RefusedError where the plan has nothing that octavo finetune runs, or the batch does not divide; UnsupportedError
    where no candidate ran at all, with the reasons.
    """
    if why := why_not(config):
        raise RefusedError(
            f"trial: octavo finetune does not run {why}", fix="Plan LoRA with checkpointing none or full."
        )
    if config.batch % processes:
        need = f"a multiple of {processes}"
        raise RefusedError(f"trial: a batch of {config.batch} sequences", need=need, fix="Change --batch.")
    device = device or _device()
    each = config.batch // processes
    micros = [n for n in range(1, each + 1) if each % n == 0]
    settings = _settings(config, report, device)
    first = settings["micro_batch"] if settings["micro_batch"] in micros else micros[-1]
    tried: list[Tried] = []
    for choice in _fallbacks(settings):
        search = _Search(config, choice, device, processes, seconds, run or run_candidate, each)
        search.largest(micros, micros.index(first))
        tried += search.tried
        if not any(one.outcome == "unsupported" for one in search.tried):
            break
        logger().warning("%s is not supported here: %s", choice["scheme"], search.tried[-1].detail)
    passed = [one for one in tried if one.outcome == "ok"]
    if not passed and not any(one.outcome in TOO_LARGE for one in tried):
        late = any(one.outcome == "timeout" for one in tried)
        raise UnsupportedError(
            "trial: no candidate ran",
            got="; ".join(dict.fromkeys(one.detail for one in tried)),
            fix="Give a candidate more time: --trial-seconds." if late else "",
        )
    best = max(passed, key=lambda one: one.micro_batch, default=None)
    return TrialReport(
        device=device,
        processes=processes,
        tried=tried,
        micro_batch=best.micro_batch if best else None,
        accumulation=best.accumulation if best else None,
        seconds_per_step=best.seconds_per_step if best else None,
        refined=_refined(passed),
    )


def run_candidate(spec: dict[str, Any], processes: int, seconds: float) -> Ended:
    """Real processes, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="octavo-trial-") as name:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps(spec | {"folder": name}))
        worker = [sys.executable, "-m", "octavo.pipelines.trial_worker", str(folder / "spec.json")]
        return run_group([[*worker, str(folder / f"rank-{rank}.json")] for rank in range(processes)], folder, seconds)


class _Search:
    """Binary search for the largest micro-batch that passes, of one precision and scheme."""

    def __init__(
        self,
        config: PlanConfig,
        settings: dict[str, Any],
        device: str,
        processes: int,
        seconds: float,
        run: Runner,
        each: int,
    ) -> None:
        self.config, self.settings, self.device, self.processes = config, settings, device, processes
        self.seconds, self.run, self.each = seconds, run, each
        self.model = read_model(config.model, config.target_modules)
        self.tried: list[Tried] = []

    def largest(self, micros: Sequence[int], first: int) -> None:
        """Ask first where the prediction is. A failure for another reason than size ends the search."""
        low, high, at = 0, len(micros) - 1, first
        while low <= high:
            outcome = self.one(micros[at])
            if outcome == "ok":
                low = at + 1
            elif outcome in TOO_LARGE:
                high = at - 1
            else:
                return
            at = (low + high) // 2

    def one(self, micro: int) -> str:
        accumulation = self.each // micro
        settings = self.settings | {"micro_batch": micro, "accumulation": accumulation}
        limit = None if self.config.max_memory_per_gpu is None else self.config.max_memory_per_gpu * GIB
        ended = self.run({"settings": settings, "limit": limit, "steps": STEPS}, self.processes, self.seconds)
        account = memory(self.model, self._setup(micro, ended.results))
        predicted = account.reserved
        peak = ended.peak
        times = [float(r["seconds_per_step"]) for r in ended.results if r.get("seconds_per_step")]
        self.tried.append(
            Tried(
                micro_batch=micro,
                accumulation=accumulation,
                precision="fp8" if settings["mode"] == "lora" else "bf16",
                scheme=settings["scheme"],
                outcome=ended.kind,
                detail=ended.detail,
                predicted_gib=predicted / GIB,
                measured_gib=None if peak is None else peak / GIB,
                error_percent=100 * (predicted / peak - 1) if peak and ended.kind == "ok" else None,
                seconds_per_step=max(times, default=None),
                seconds=round(ended.seconds, 2),
            )
        )
        return ended.kind

    def _setup(self, micro: int, results: Sequence[dict[str, Any]]) -> Setup:
        """results: of the ranks, which say what their FP8 linears ran on."""
        cpu = self.device == "cpu"
        backend = next((str(one["backend"]) for one in results if "backend" in one), "cpu" if cpu else "dequant")
        return Setup(
            precision="fp8" if self.settings["mode"] == "lora" else "bf16",
            rank=self.config.rank,
            context=self.config.context,
            micro=micro,
            checkpointing=self.settings["checkpointing"],
            accumulation=self.each // micro,
            expandable=expandable_segments() or not setting(),  # octavo finetune asks for them where nobody else does
            width=4 if cpu else 2,
            saved_fp8=backend == "native" and self.settings.get("activation") == "token",
            backend=backend,
            world=self.processes,
            sharding="ddp" if self.processes > 1 else "none",
        )


def _settings(config: PlanConfig, report: PlanReport, device: str) -> dict[str, Any]:
    """Of the plan's first option, or where none fits the tables, of the smallest step there is."""
    chosen = report.run or {"mode": "two-stage" if config.precision == "bf16" else "lora", "micro_batch": 1}
    smallest = {
        "scheme": config.scheme,
        "checkpointing": "none" if config.checkpointing == "none" else "full",
        "rank": config.rank,
    }
    settings = smallest | {"context": config.context, "model": config.model} | chosen
    return {k: v for k, v in settings.items() if k not in ("data", "out", "max_steps")} | {"device": device}


def _fallbacks(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What to try where this machine has no such FP8 product: scales per tensor, then 16 bit."""
    if settings["mode"] != "lora":
        return [settings]
    choices = [settings, settings | {"scheme": "tensor"}, settings | {"mode": "two-stage"}]
    return choices if settings["scheme"] != "tensor" else [choices[0], choices[2]]


def _refined(passed: list[Tried]) -> dict[str, float] | None:
    """A straight line through the smallest and the largest measurement, or the prediction scaled to the only one."""
    known = sorted((one for one in passed if one.measured_gib), key=lambda one: one.micro_batch)
    if not known:
        return None
    small, large = known[0], known[-1]
    if small.micro_batch == large.micro_batch:
        return {"factor": (small.measured_gib or 0.0) / small.predicted_gib}
    per = ((large.measured_gib or 0.0) - (small.measured_gib or 0.0)) / (large.micro_batch - small.micro_batch)
    return {"persistent_gib": (small.measured_gib or 0.0) - per * small.micro_batch, "per_sequence_gib": per}


def confirmed(report: PlanReport, found: TrialReport) -> PlanReport:
    """The plan with the confirmed micro-batch, precision and scheme in its run."""
    if found.micro_batch is None or report.run is None:
        return report.model_copy(update={"run": None, "command": None})
    best = next(o for o in found.tried if o.outcome == "ok" and o.micro_batch == found.micro_batch)
    run = report.run | {"micro_batch": best.micro_batch, "accumulation": best.accumulation, "scheme": best.scheme}
    run["mode"] = "lora" if best.precision == "fp8" else "two-stage"
    return report.model_copy(update={"run": run})


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
