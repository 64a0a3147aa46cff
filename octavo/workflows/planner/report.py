"""What a plan reports: one record for Python, for --json and for the tables."""

from __future__ import annotations

from typing import Any, Literal

from octavo.base.report import Report
from octavo.workflows.planner.search import Candidate, place_name
from octavo.workflows.planner.tables import GIB


class Option(Report):
    """One way to run. memory_gib: predicted peak of one GPU with its bounds, usable_gib what torch reports of it.

    terms_gib: parts of the peak, at `instant`; dominant: the largest. seconds_per_step with its bounds; parts: where
    they go. mfu: of the BF16 peak, without recomputation. hours, cost_usd: of the whole run; None: unknown.
    """

    where: str
    gpu: str
    gpus: int
    nodes: int
    sharding: str
    precision: str
    arithmetic: str
    scheme: str
    checkpointing: str
    micro_batch: int
    accumulation: int
    memory_gib: float
    memory_range_gib: tuple[float, float]
    usable_gib: float
    instant: str
    dominant: str
    terms_gib: dict[str, float]
    seconds_per_step: float
    seconds_range: tuple[float, float]
    parts_s: dict[str, float]
    bound: str
    rates: Literal["measured", "estimated"]
    tokens_per_second: float
    mfu: float
    usd_per_hour: float | None
    usd_per_million_tokens: float | None
    hours: float | None
    cost_usd: float | None
    notes: list[str]


class Rejection(Report):
    """A way that does not keep the limits. where: the machine; what: the setting, empty for all of them."""

    where: str
    what: str
    reason: str


class PlanReport(Report):
    """parameters: exact, of all that is held in memory. by_role: the same in parts. trained: parameters that train.

    from_headers: counted from safetensors headers, else by formula. options: the best
    of every place, best first. pareto: those that no other
    beats in both cost and time. run: settings of octavo finetune for the first option, None where it cannot run it.
    """

    model: str
    parameters: int
    by_role: dict[str, int]
    from_headers: bool
    trained: int
    method: str
    context: int
    batch: int
    steps: int | None
    options: list[Option]
    pareto: list[Option]
    rejected: list[Rejection]
    notes: list[str]
    run: dict[str, Any] | None
    command: str | None


def option(one: Candidate, steps: int | None) -> Option:
    """steps: of the whole run, None where its length is not known."""
    rate, price = one.tokens_per_second, one.price
    return Option(
        where=place_name(one.machine, one.nodes),
        gpu=one.machine.gpu.name,
        gpus=one.setup.world,
        nodes=one.nodes,
        sharding=one.setup.sharding,
        precision=one.setup.precision,
        arithmetic=one.arithmetic,
        scheme=one.scheme,
        checkpointing=one.setup.checkpointing,
        micro_batch=one.setup.micro,
        accumulation=one.setup.accumulation,
        memory_gib=one.memory.peak / GIB,
        memory_range_gib=(one.memory.low / GIB, one.memory.high / GIB),
        usable_gib=one.machine.gpu.memory / GIB,
        instant=one.memory.instant,
        dominant=one.memory.dominant,
        terms_gib={name: value / GIB for name, value in one.memory.terms.items()},
        seconds_per_step=one.time.seconds,
        seconds_range=(one.time.low, one.time.high),
        parts_s=dict(one.time.parts),
        bound=one.time.bound,
        rates="measured" if one.time.measured else "estimated",
        tokens_per_second=rate,
        mfu=one.time.mfu,
        usd_per_hour=price,
        usd_per_million_tokens=None if price is None else price / 3600 / rate * 1e6,
        hours=None if steps is None else one.hours(steps),
        cost_usd=None if steps is None else one.cost(steps),
        notes=list(one.notes),
    )
