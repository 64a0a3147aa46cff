"""tune: which layers stay in 16 bit, for the least divergence per byte; writes policy.json.

1. Every layer's own share of the divergence is estimated, all at once, by backward passes (octavo.modules.attribution).
2. The layers that matter most are measured alone, and everything in FP8 is; the estimates are corrected by that.
3. A knapsack over the layers gives the best choice for every number of bytes.
4. Divergences of layers do not add exactly: what is chosen is measured as a whole.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.base.errors import ConfigError, RefusedError, require_type
from octavo.base.report import atomic_write
from octavo.formats.architectures import role
from octavo.formats.recipe import Recipe
from octavo.integrations.hub import resolve_model
from octavo.integrations.moments import moments_of
from octavo.pipelines.lab import Lab
from octavo.pipelines.phases import Facts, Phases, Say, silent
from octavo.pipelines.targets import Picks, Size, Target, choices, corrected, picks_of, size_of
from octavo.pipelines.tune_page import tune_page
from octavo.pipelines.tune_report import Point, TuneConfig, TuneReport, UnitReport
from octavo.store.manifest import fingerprint
from octavo.store.policy import POLICY, Policy, PolicyEntry
from octavo.store.tensors import Checkpoint
from octavo.store.units import HIGH, Unit, find_units

MOST_JOINT = 6  # measurements on the way to a budget
CURVE = 40  # points of the report's curve
OWN_RULE = {
    "head": "the output head: its errors reach every logit undamped, and neither a tied nor a native one can be FP8",
    "embedding": "looked up, not multiplied: no engine serves embeddings in FP8",
}
NO_TIMES = "bytes alone: there is no measured table of kernel times for this machine"


def tune(config: TuneConfig, say: Say = silent) -> TuneReport:
    """Measure, choose, measure again; write `out/policy.json`, report.json and report.html.

    RefusedError: the budget is out of reach within `keep`; the report says how far it got, and there is no policy.
    ConfigError for targets that are none, CheckpointError for a model that is FP8 already, DataError for no text.
    """
    require_type("tune: config", config, TuneConfig)
    target = Target.parse(config.budget, config.keep)
    job = Tuning(config, say)
    best, predicted = job.within_share(target) if target.budget is None else job.within_budget(target)
    report = job.report(target, best, predicted)
    config.out.mkdir(parents=True, exist_ok=True)
    report.write(config.out / "report.json")
    atomic_write(config.out / "report.html", tune_page(report))
    path = config.out / POLICY
    if target.budget is not None and report.kl > target.budget:
        path.unlink(missing_ok=True)
        raise job.out_of_reach(target, report)
    job.policy(best, report).write(path)
    return report


class Tuning:
    """One job: what is known about the model, and the phases that find out the rest."""

    def __init__(self, config: TuneConfig, say: Say) -> None:
        self.config = config
        self.source = Checkpoint.open(resolve_model(config.model))
        rule = config.model_dump(include={"scale_format", "rounding", "method"})
        schemes = dict.fromkeys((config.scheme, *config.alternatives))
        recipes = [Recipe.named(name, skip=config.skip, **rule) for name in schemes]
        self.base = recipes[0]
        self.units, self.bytes_16bit = find_units(self.source, recipes, config.layout)
        if not self.units:
            raise ConfigError(f"scheme {config.scheme} quantizes no layer of {config.model}", fix="Check --skip.")
        self.fingerprint = fingerprint(self.source)
        free = {"budget", "keep", "out", "checks", "device"}
        settings = {**config.model_dump(mode="json", exclude=free), "model": self.fingerprint, "octavo": __version__}
        self.phases = Phases(config.out, "tune", settings, say)
        self.all_fp8: Picks = {unit.name: self.base.name for unit in self.units}
        self.measured: dict[str, float] = {}
        self.points: dict[str, tuple[Picks, Facts]] = {}
        self.moments = self._moments()

    @cached_property
    def losses(self) -> dict[str, dict[str, float]]:
        """option -> unit -> KL of the unit alone: estimated, and corrected by measurements."""
        found = self.phases.run("single layers", "Every layer's share, estimated", lambda: self.lab.attribute())
        estimates, few = (
            {option: {u.name: shares.get(u.name, 0.0) for u in self.units} for option, shares in part.items()}
            for part in (found["every"], found["few"])
        )
        first = sorted(self.units, key=lambda unit: -_density(unit, estimates[self.base.name], self.base.name))
        names = [unit.name for unit in first[: self.config.checks]]
        title = f"All in FP8, and layers alone ({len(names)}), measured"
        facts = self.phases.run(f"alone {len(names)}", title, lambda: self.lab.alone(self.all_fp8, names))
        self.measured = facts["alone"]
        self.points["all"] = (self.all_fp8, facts)
        return corrected(estimates, few[self.base.name], self.measured, self.base.name)

    @property
    def additivity(self) -> float:
        total = sum(self.losses[self.base.name].values())
        return float(self.points["all"][1]["kl"]) / total if total > 0 else 1.0

    def _moments(self) -> Path | None:
        """The folder of second moments, gathered where compensated rounding needs them and none are given."""
        config = self.config
        if config.rounding == "nearest" or config.moments is not None:
            return config.moments
        out = config.out / "moments"
        sizes: dict[str, Any] = {"samples": config.samples, "context": config.context, "weighting": "fisher"}
        more: dict[str, Any] = {"device": config.device, "dtype": config.dtype, "every": 1}

        def gather() -> Facts:
            return {"tokens": moments_of(self.source.folder, config.data, out, **sizes, **more).index.tokens}

        self.phases.run("moments", "Second moments of the inputs", gather, out)
        return out

    @cached_property
    def lab(self) -> Lab:
        return Lab(self.config, self.source, self.units, self.base, self.moments)

    def joint(self, picks: Picks) -> Facts:
        """The measured divergence of a policy as a whole."""
        key = hashlib.sha256(repr(sorted(picks.items())).encode()).hexdigest()[:12]
        if picks == self.all_fp8:
            return self.points["all"][1]
        share = 100 * size_of(self.units, picks, self.bytes_16bit).share
        title = f"Measuring a policy that keeps {share:.2f} % of the bytes"
        facts = self.phases.run(f"joint {key}", title, lambda: self.lab.joint(picks))
        self.points[key] = (picks, facts)
        return facts

    def within_share(self, target: Target) -> tuple[Picks, float]:
        """The choice of least predicted divergence within the share, and that divergence."""
        found = choices(self.units, self.losses, self.bytes_16bit, target.keep)
        picks = picks_of(self.units, found[-1])
        self.joint(picks)
        return picks, self.additivity * found[-1].loss

    def within_budget(self, target: Target) -> tuple[Picks, float]:
        """The lightest choice whose measured divergence is within the budget, or the best there is within the share.

        Prediction is off by a factor that changes slowly along the frontier: each measurement corrects it for the next.
        """
        assert target.budget is not None
        found = choices(self.units, self.losses, self.bytes_16bit, target.keep)
        factor, low, high = self.additivity, -1, len(found) - 1
        best: tuple[Picks, float] | None = None
        for _ in range(MOST_JOINT):
            guess = next((i for i, c in enumerate(found) if factor * c.loss <= target.budget), len(found) - 1)
            if best is not None and guess > high:
                break
            index = min(max(guess, low + 1), high)
            picks, predicted = picks_of(self.units, found[index]), factor * found[index].loss
            measured = float(self.joint(picks)["kl"])
            factor = measured / found[index].loss if found[index].loss > 0 else factor
            if measured <= target.budget:
                best, high = (picks, predicted), index - 1
            else:
                low = index
            if low >= high or (best is None and index == len(found) - 1):
                break
        return best or (picks_of(self.units, found[-1]), factor * found[-1].loss)

    def report(self, target: Target, picks: Picks, predicted: float) -> TuneReport:
        facts, size = self.joint(picks), size_of(self.units, picks, self.bytes_16bit)
        return TuneReport(
            policy=str(self.config.out / POLICY),
            budget=target.budget,
            keep=None if target.keep is None else float(target.keep),
            kl=facts["kl"],
            kl_se=facts["se"],
            kl_fp8=self.points["all"][1]["kl"],
            predicted=predicted,
            additivity=self.additivity,
            bytes=size.total,
            bytes_fp8=size_of(self.units, self.all_fp8, self.bytes_16bit).total,
            bytes_16bit=self.bytes_16bit,
            share=size.share,
            weighed=NO_TIMES,
            exceptions=self.exceptions(picks),
            curve=self.curve(),
            tokens=facts["tokens"],
            seconds=round(self.phases.seconds, 1),
            next=self.commands(),
            **self.config.model_dump(include={"model", "scheme", "rounding", "layout", "activation"}),
        )

    def exceptions(self, picks: Picks) -> list[UnitReport]:
        """The units that are not as the scheme has them, those that save most first."""
        base, losses = self.base.name, self.losses[self.base.name]
        found = [
            UnitReport(
                unit=unit.name,
                option=option,
                bytes=unit.size[option] - unit.size[base],
                kl=losses[unit.name],
                measured=unit.name in self.measured,
            )
            for unit in self.units
            if (option := picks[unit.name]) != base
        ]
        return sorted(found, key=lambda entry: -entry.kl)

    def curve(self) -> list[Point]:
        """Predicted, closer together where few layers stay in 16 bit, and everything that was measured, by size."""
        found = choices(self.units, self.losses, self.bytes_16bit)
        steps = {round((i / CURVE) ** 2 * (len(found) - 1)) for i in range(CURVE + 1)}
        points = [self._point(picks_of(self.units, found[i]), self.additivity * found[i].loss) for i in sorted(steps)]
        for picks, facts in self.points.values():
            points.append(self._point(picks, facts["kl"], se=facts["se"], measured=True))
        return sorted(points, key=lambda point: (point.bytes, point.measured))

    def _point(self, picks: Picks, kl: float, **more: Any) -> Point:
        size: Size = size_of(self.units, picks, self.bytes_16bit)
        return Point(bytes=size.total, share=size.share, kl=kl, **more)

    def policy(self, picks: Picks, report: TuneReport) -> Policy:
        """All that was decided, layer by layer, tied to the model."""
        entries: dict[str, PolicyEntry] = {}
        for unit in self.units:
            option, kl = picks[unit.name], self.losses[self.base.name][unit.name]
            for pattern in unit.patterns:
                rule = "" if option == HIGH else str(unit.rules[option][pattern])
                entries[pattern] = PolicyEntry(
                    precision="16bit" if option == HIGH else "fp8",
                    scheme="" if option in (HIGH, self.base.name) else option,
                    rule=rule,
                    reason=f"in FP8 alone it adds {kl:.2g} nats per token" if option != self.base.name else "",
                    kl=kl,
                )
        for tensor, shape in self.source.shapes().items():
            kind = role(tensor, shape, self.source.layers)
            if kind in OWN_RULE:
                entries[tensor.removesuffix(".weight")] = PolicyEntry(precision="16bit", reason=OWN_RULE[kind])
        measured = report.model_dump(
            include={"kl", "kl_se", "kl_fp8", "bytes", "share", "rounding", "layout", "tokens"}
        )
        return Policy(model_fingerprint=self.fingerprint, scheme=self.base.name, measured=measured, modules=entries)

    def commands(self) -> list[str]:
        """What to do with the policy."""
        config, policy = self.config, self.config.out / POLICY
        if config.layout == "memory":
            rounding = f", rounding='compensated', moments={str(self.moments)!r}" if self.moments else ""
            return [f"octavo.load({config.model!r}, policy={str(policy)!r}{rounding})"]
        words = [f"octavo quantize {config.model} OUT --policy {policy} --layout {config.layout}"]
        words += [f"--scale-format {config.scale_format}"] if config.scale_format != "fp32" else []
        words += [f"--method {config.method}"] if config.method else []
        words += [f"--rounding compensated --moments {self.moments}"] if config.rounding == "compensated" else []
        return [" ".join(words), f"octavo verify OUT --policy {policy}"]

    def out_of_reach(self, target: Target, report: TuneReport) -> RefusedError:
        """How far it got, and what would have been needed."""
        assert target.budget is not None
        within = "" if target.keep is None else f" within {float(target.keep):.2%} of the bytes"
        enough = next((p.share for p in report.curve if not p.measured and p.kl <= target.budget), 1.0)
        return RefusedError(
            f"budget kl={target.budget:g}{within}",
            got=f"KL {report.kl:.5f} with {report.share:.2%} of the bytes in 16 bit, {report.kl_fp8:.5f} with none",
            fix=f"It needs about --keep {enough:.1%}, or --rounding compensated. See {self.config.out}/report.html.",
        )


def _density(unit: Unit, losses: dict[str, float], scheme: str) -> float:
    """Divergence that 16 bit saves per byte it costs."""
    return losses[unit.name] / max(unit.size[HIGH] - unit.size[scheme], 1)
