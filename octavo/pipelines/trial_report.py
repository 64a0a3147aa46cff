"""What a trial found. Apart from trial.py, so that a plan without a trial imports neither it nor its processes."""

from __future__ import annotations

from octavo.base.report import Report


class Tried(Report):
    """One candidate. outcome: ok, out of memory, thrashing, timeout, unsupported, no gradient, error; detail: why.

    Memory in GiB: predicted without context, NCCL and fragmentation on a CPU, where measured is what the process grew
    by; reserved by torch's allocator on a GPU. error_percent: predicted against measured.
    """

    micro_batch: int
    accumulation: int
    precision: str
    scheme: str
    outcome: str
    detail: str
    predicted_gib: float
    measured_gib: float | None
    error_percent: float | None
    seconds_per_step: float | None
    seconds: float


class TrialReport(Report):
    """device: where the steps ran. tried: in order. micro_batch: the largest that is confirmed; None: no candidate ran.

    refined: GiB that stay, and GiB per sequence of a micro-batch, from the measurements; with one measurement, the
    prediction's own share of what stays.
    """

    device: str
    processes: int
    tried: list[Tried]
    micro_batch: int | None
    accumulation: int | None
    seconds_per_step: float | None
    refined: dict[str, float] | None
