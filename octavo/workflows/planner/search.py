"""Search: every way to run the model on the machines at hand, those that keep the limits, and why the others do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from octavo.workflows.planner import fused
from octavo.workflows.planner.memory import Memory, memory, trained_parameters
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.tables import GIB, Backend, Gpu, Machine, backend, factor, load
from octavo.workflows.planner.timing import StepTime, fp8_arithmetic, step_time

# The allocator starts to free and retry above this share of the card, several times slower than it was.
USABLE = 0.95


@dataclass(frozen=True)
class Limits:
    """batch: sequences of one optimizer step over all GPUs, met exactly. memory: bytes of one GPU; gpus: at most; money
    in USD and hours for the whole run of `steps` steps. None: no limit; steps None: the length is not known."""

    batch: int
    memory: float | None = None
    gpus: int | None = None
    budget: float | None = None
    hours: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to run. nodes: instances. scheme: of FP8 scales. arithmetic: products in fp8 or 16bit. notes: hints."""

    machine: Machine
    nodes: int
    setup: Setup
    scheme: str
    arithmetic: str
    memory: Memory
    time: StepTime
    notes: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.setup.tokens * self.setup.world * self.setup.accumulation / self.time.seconds

    @property
    def price(self) -> float | None:
        """USD an hour of all instances."""
        return None if self.machine.price is None else self.machine.price * self.nodes

    def hours(self, steps: int) -> float:
        return self.time.seconds * steps / 3600

    def cost(self, steps: int) -> float | None:
        return None if self.price is None else self.price * self.hours(steps)


@dataclass(frozen=True)
class Rejected:
    """where: the machine. what: the setting. reason: in numbers."""

    where: str
    what: str
    reason: str


def search(
    model: Model, machines: list[Machine], wanted: list[Setup], limits: Limits, scheme: str
) -> tuple[list[Candidate], list[Rejected]]:
    """wanted: settings to try, micro-batch, world and sharding left open. For each way to place the model the fastest
    micro-batch that fits."""
    found: list[Candidate] = []
    rejected: list[Rejected] = []
    for machine, nodes in _places(machines, limits):
        world = machine.gpus * nodes
        where = place_name(machine, nodes)
        if limits.gpus is not None and world > limits.gpus:
            rejected.append(Rejected(where, "", f"{world} GPUs, at most {limits.gpus} wanted"))
            continue
        if limits.batch % world:
            reason = f"a batch of {limits.batch} sequences does not divide among {world} GPUs"
            rejected.append(Rejected(where, "", reason))
            continue
        for setup in wanted:
            for sharding in ("none",) if world == 1 else ("ddp", "fsdp"):
                placed = replace(setup, world=world, sharding=sharding)
                result = _best(model, machine, nodes, placed, limits, scheme)
                if isinstance(result, Candidate):
                    found.append(result)
                else:
                    rejected.append(Rejected(where, describe(placed), result))
    return found, rejected


def pareto(candidates: list[Candidate]) -> list[Candidate]:
    """Those that no other beats in both seconds and price of a step, in order of time. A candidate of unknown price is
    compared with others of unknown price, by time alone."""
    kept: list[Candidate] = []
    cheapest, fastest_unpriced = float("inf"), float("inf")
    for one in sorted(candidates, key=lambda one: (one.time.seconds, one.cost(1) or 0.0)):
        cost = one.cost(1)
        if cost is None and one.time.seconds < fastest_unpriced:
            fastest_unpriced = one.time.seconds
            kept.append(one)
        elif cost is not None and cost < cheapest:
            cheapest = cost
            kept.append(one)
    return kept


def per_place(candidates: list[Candidate]) -> list[Candidate]:
    """The first of every machine and number of instances."""
    first: dict[str, Candidate] = {}
    for one in candidates:
        first.setdefault(place_name(one.machine, one.nodes), one)
    return list(first.values())


def describe(setup: Setup) -> str:
    parts = [f"{setup.precision}{', saved too' * setup.saved_fp8}", f"checkpointing {setup.checkpointing}"]
    return ", ".join(parts + ([setup.sharding] if setup.sharding != "none" else []))


def place_name(machine: Machine, nodes: int) -> str:
    name = machine.name or f"{machine.gpus} x {machine.gpu.name}"
    return f"{nodes} x {name}" if nodes > 1 else name


def octavo_arithmetic(gpu: Gpu, scheme: str) -> tuple[str, str, str]:
    """How Octavo's own products run over FP8 codes on this GPU: (fp8 or 16bit, the scheme that gives it, why)."""
    kind = "fp8" if any(own.products == "fp8" for own in _backends(gpu.sm)) else "16bit"
    reason = fp8_arithmetic(gpu, scheme)
    if reason is None:
        why = "" if kind == "fp8" else "FP8 codes, products in 16 bit: Octavo has no FP8 product here yet"
        return kind, scheme, why
    if scheme != "tensor" and fp8_arithmetic(gpu, "tensor") is None and kind == "fp8":
        return "fp8", "tensor", f"{reason}: scheme tensor instead"
    return "16bit", scheme, reason


def octavo_backend(gpu: Gpu, arithmetic: str) -> str:
    """The first of Octavo's backends for this GPU that multiplies so."""
    return next((own.name for own in _backends(gpu.sm) if own.products == arithmetic), "reference")


def _backends(sm: str) -> list[Backend]:
    """Those that octavo finetune can take: it does not round the inputs of frozen linears."""
    found = [backend(name) for name in _order(sm) if name in load("capability")["backends"]]
    return [own for own in found if not own.rounded]


@cache
def _order(sm: str) -> tuple[str, ...]:
    """Backends in the order in which octavo.ops asks them for a linear on a GPU."""
    table = json.loads(resources.files("octavo.ops").joinpath("table.json").read_text(encoding="utf-8"))
    rows = [r for r in table["rows"] if r["op"] in ("*", "linear") and r["device"] in ("*", "cuda", sm)]
    return tuple(rows[0]["order"]) if rows else ()


def _places(machines: list[Machine], limits: Limits) -> Iterator[tuple[Machine, int]]:
    """Each machine once, and several of an instance type where more GPUs are allowed than one has."""
    for machine in machines:
        nodes = 1
        yield machine, nodes
        while machine.name and limits.gpus and machine.gpus > 1 and machine.gpus * nodes * 2 <= limits.gpus:
            nodes *= 2
            yield machine, nodes


def _best(model: Model, machine: Machine, nodes: int, setup: Setup, limits: Limits, scheme: str) -> Candidate | str:
    """The fastest micro-batch that keeps the limits, or why there is none."""
    arithmetic, used, why = (
        octavo_arithmetic(machine.gpu, scheme) if setup.precision == "fp8" else ("16bit", scheme, "")
    )
    if setup.precision == "fp8" and machine.gpu.sm not in load("capability")["storage"]["sm"]:
        return f"FP8 storage needs sm80 or later, {machine.gpu.name} is {machine.gpu.sm}"
    if setup.precision == "fp8" and setup.method == "full" and arithmetic != "fp8":
        return f"FP8 for full training is a matter of FP8 products alone: {why}"
    if setup.saved_fp8:
        reason = fused.refused(model, scheme) or fp8_arithmetic(machine.gpu, scheme)
        if reason:
            return reason
        arithmetic, used, why = "fp8", scheme, ""
    usable = min(machine.gpu.memory, limits.memory or machine.gpu.memory) * USABLE
    best: Candidate | None = None
    reason = ""
    each = limits.batch // setup.world
    own = "native" if setup.saved_fp8 else octavo_backend(machine.gpu, arithmetic)
    for micro in (n for n in range(1, each + 1) if each % n == 0):
        tried = replace(setup, micro=micro, accumulation=each // micro, backend=own)
        account = memory(model, tried)
        if account.high > usable:
            reason = reason or _too_big(account, usable, machine)
            break
        seconds = step_time(model, tried, machine, nodes)
        if best is None or seconds.seconds < best.time.seconds * 0.99:  # a larger one must be worth its memory
            notes = tuple(note for note in (why, _host(model, tried, machine, nodes)) if note)
            best = Candidate(machine, nodes, tried, used, arithmetic, account, seconds, notes)
    if best is None:
        return reason
    return _over_limits(best, limits) or best


def _over_limits(one: Candidate, limits: Limits) -> str:
    if limits.hours is not None and limits.steps and one.hours(limits.steps) > limits.hours:
        return f"takes {one.hours(limits.steps):.3g} h, the deadline is {limits.hours:g} h"
    if limits.budget is None or not limits.steps:
        return ""
    cost = one.cost(limits.steps)
    if cost is None:
        return "its price is unknown, so a budget cannot be kept: give one with --prices"
    return f"costs {cost:.4g} USD, the budget is {limits.budget:g}" if cost > limits.budget else ""


def _too_big(account: Memory, usable: float, machine: Machine) -> str:
    return (
        f"one sequence needs {account.low / GIB:.1f} to {account.high / GIB:.1f} GiB, mostly {account.dominant}; "
        f"{usable / GIB:.1f} GiB are usable: {USABLE:.0%} of {usable / USABLE / GIB:.2f} GiB"
    )


def host_bytes(model: Model, setup: Setup, nodes: int) -> float:
    """RAM of one host for asynchronous snapshots of the training state: pinned copies of values and moments."""
    trained = trained_parameters(model, setup)
    staged = 12.0 * trained / (nodes if setup.sharding == "fsdp" else 1)
    return factor("host_base_gib").value * GIB + staged


def _host(model: Model, setup: Setup, machine: Machine, nodes: int) -> str:
    need = host_bytes(model, setup, nodes)
    if machine.ram is None or need <= machine.ram:
        return ""
    return (
        f"snapshots must be synchronous: staging them in pinned memory takes {need / GIB:.0f} GiB with the rest, "
        f"the host has {machine.ram / GIB:.0f} GiB"
    )
