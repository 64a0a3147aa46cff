"""plan, and with --trial the real steps that confirm it."""

from __future__ import annotations

import pydantic

from octavo.base.errors import require_type
from octavo.base.report import Report
from octavo.pipelines.trial_report import TrialReport
from octavo.workflows.plan import PlanConfig, write_run
from octavo.workflows.plan import plan as predict
from octavo.workflows.planner.report import PlanReport


class PlanJobConfig(PlanConfig):
    """As PlanConfig. trial: run real steps on this machine, on `device`, in so many processes, each candidate at most
    so many seconds; max_memory_per_gpu is then a limit that is enforced.
    """

    trial: bool = False
    trial_seconds: float = pydantic.Field(600.0, gt=0)
    trial_processes: int = pydantic.Field(1, ge=1)
    device: str | None = None


class PlanJob(Report):
    """plan: the prediction. trial: what real steps said, None without --trial."""

    plan: PlanReport
    trial: TrialReport | None


def plan(config: PlanJobConfig) -> PlanJob:
    """The plan, and the trial if one was asked for; run.yaml then has what the trial confirmed."""
    require_type("plan: config", config, PlanJobConfig)
    plain = PlanConfig(**{name: getattr(config, name) for name in PlanConfig.model_fields})
    if not config.trial:
        return PlanJob(plan=predict(plain), trial=None)
    from octavo.pipelines.trial import confirmed, trial

    report = predict(plain.model_copy(update={"write": None}))
    found = trial(plain, report, seconds=config.trial_seconds, processes=config.trial_processes, device=config.device)
    report = confirmed(report, found)
    if config.write is not None:
        write_run(config.write, report)
    return PlanJob(plan=report, trial=found)
