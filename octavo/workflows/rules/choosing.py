"""Which scheme, layout and scale format one engine on one GPU wants: every way to write the model is planned from
headers, judged by verify's rules, and the best one wins. No second table of knowledge."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from octavo.base.errors import ConfigError, InputError, RefusedError
from octavo.formats.architectures import role
from octavo.formats.granularity import PerBlock
from octavo.formats.recipe import Recipe
from octavo.formats.rule import Assignment
from octavo.formats.scale import is_power_of_two
from octavo.store import schema
from octavo.store.carry import carry_over
from octavo.store.plan import make_plan
from octavo.store.relayout import plan_relayout
from octavo.store.tensors import Checkpoint
from octavo.store.writer import Entries
from octavo.workflows.rules.engine import Target
from octavo.workflows.rules.findings import Finding, verdict
from octavo.workflows.rules.judge import Judgement
from octavo.workflows.rules.planned import judge_planned, planned_model
from octavo.workflows.rules.predicted import rounds_scales

SCHEMES = (("block128", "ct"), ("block128", "native"), ("channel", "ct"))
EXPERTS = ("*.experts.*",)
SCHEME_OF = {"block": "block128", "row": "channel", "tensor": "tensor"}
VERDICTS = ("ok", "warn", "error")
MODES = ("w8a8", "w8a16")


@dataclass(frozen=True)
class Option:
    """One way to write the model. recipe None: keep codes and scales, change names at most.

    lossless: the engine will compute with the numbers that are stored now. share: of the linears' values in FP8.
    blocks: of those, the share with block scales.
    """

    scheme: str
    layout: str
    recipe: Recipe | None
    findings: list[Finding]
    judgement: Judgement
    lossless: bool
    share: float
    blocks: float

    @property
    def name(self) -> str:
        if self.recipe is None:
            return f"{self.scheme} {self.layout} as stored"
        experts = ", experts in 16 bit" if self.recipe.skip else ""
        return f"{self.scheme} {self.layout} {self.recipe.rule.scale_format}{experts}"

    @property
    def mode(self) -> str:
        return self.judgement.mode

    @property
    def problem(self) -> str:
        """The worst finding, in one line."""
        worst = next((f for f in self.findings if f.severity != "info"), None)
        return f"{worst.code}: {worst.message}" if worst else ""

    @property
    def rounds(self) -> bool:
        """Whether a kernel of this option makes powers of two of its block scales."""
        return self.blocks > 0 and any(
            k.endswith("block") and rounds_scales(v) for k, v in self.judgement.kernels.items()
        )

    def rank(self, stored: str) -> tuple[float, ...]:
        """Smaller is better: loads, multiplies in FP8, loses nothing, leaves little in 16 bit, suits the kernel."""
        mode = MODES.index(self.mode) if self.mode in MODES else len(MODES)
        exact = 0 if self.lossless else 1
        # Where most of it cannot be blocks, one kernel for all is worth more than finer scales for some.
        unfit = 2 if 0 < self.blocks < 0.5 else int((self.blocks > 0) != (self.mode == "w8a8"))
        moved = self.layout != stored if stored in schema.LAYOUTS else self.layout != "ct"
        late = self.recipe is None and self.rounds and not self.lossless  # the engine rounds what could be stored so
        return VERDICTS.index(verdict(self.findings)), mode, exact, -round(self.share, 2), unfit, late, moved


def choose(source: Checkpoint, target: Target) -> tuple[Option, dict[str, str]]:
    """The best option, and of the others the reason against each. RefusedError when none loads."""
    stored = schema.parse_quantization_config(schema.stored_quantization(source)).layout
    options, against = _options(source, target, stored)
    ranked = sorted(options, key=lambda option: option.rank(stored))
    if not ranked or verdict(ranked[0].findings) == "error":
        reasons = {o.name: o.problem for o in ranked} | against
        raise RefusedError(
            f"no way to write it loads in {target.engine} on {target.gpu} with tensor-parallel size {target.tp}",
            got="; ".join(f"{name}: {reason}" for name, reason in reasons.items())[:2000],
            fix="Use a smaller --tp or another engine; `octavo verify` says more.",
        )
    best = ranked[0]
    return best, against | {o.name: _why_not(o, best, stored) for o in ranked[1:]}


def _options(source: Checkpoint, target: Target, stored: str) -> tuple[list[Option], dict[str, str]]:
    options: list[Option] = []
    against: dict[str, str] = {}
    for layout in schema.LAYOUTS if stored != "none" else ():
        try:
            plan = plan_relayout(source, layout)
        except InputError as error:
            against[f"{layout} as stored"] = error.message
            continue
        scheme = SCHEME_OF.get(plan.recipe.rule.granularity.name, plan.recipe.rule.granularity.name)
        shapes = {name.removesuffix(".weight"): shape for name, shape in source.shapes().items()}
        option = _judged(
            source, target, scheme, layout, None, plan.entries, plan.quantization, plan.assignments, shapes
        )
        if option.rounds and not _powers_of_two(source, plan.assignments):
            option = Option(**{**option.__dict__, "lossless": False})
        options.append(option)
    experts = any(role(n, s, source.layers) == "expert" for n, s in source.shapes().items())
    for scheme, layout, skip in ((*way, skip) for skip in ((), EXPERTS)[: 1 + experts] for way in SCHEMES):
        try:
            option = _quantized(source, target, layout, Recipe.named(scheme, skip=skip))
            if option.rounds:
                option = _quantized(source, target, layout, Recipe.named(scheme, skip=skip, scale_format="po2"))
        except ConfigError as error:
            against[f"{scheme} {layout}"] = error.message
            continue
        if option.share == 0 or (scheme == "block128" and not option.blocks):
            against[option.name] = "no linear of this model is whole blocks of 128"
        else:
            options.append(option)
    return options, against


def _quantized(source: Checkpoint, target: Target, layout: str, recipe: Recipe) -> Option:
    plan = make_plan(source, recipe, layout, dequantize=True)
    config, _ = carry_over(schema.stored_quantization(source), plan.quantization_config(recipe))
    shapes = {outcome.module: outcome.shape for outcome in plan.outcomes}
    return _judged(source, target, recipe.name, layout, recipe, plan.entries, config, plan.assignments, shapes)


def _judged(
    source: Checkpoint,
    target: Target,
    scheme: str,
    layout: str,
    recipe: Recipe | None,
    entries: Entries,
    quantization: dict[str, object],
    assignments: dict[str, Assignment],
    shapes: dict[str, tuple[int, ...]],
) -> Option:
    findings, judgement = judge_planned(planned_model(source, entries, quantization), target)
    linear = {m: a.rule for m, a in assignments.items() if a.role in ("linear", "expert")}
    sizes = {module: prod(shapes[module]) for module in linear}
    fp8 = sum(size for m, size in sizes.items() if linear[m] is not None)
    in_blocks = sum(size for m, size in sizes.items() if (r := linear[m]) and isinstance(r.granularity, PerBlock))
    share, blocks = fp8 / max(sum(sizes.values()), 1), in_blocks / max(fp8, 1)
    return Option(scheme, layout, recipe, findings, judgement, recipe is None, share, blocks)


def _powers_of_two(source: Checkpoint, assignments: dict[str, Assignment]) -> bool:
    """Whether all block scales are powers of two already; reads them."""
    for module, decision in assignments.items():
        if decision.rule is not None and isinstance(decision.rule.granularity, PerBlock):
            name = schema.stored_scale_name(source, module)
            if name is not None and not bool(is_power_of_two(source.get(name).float()).all()):
                return False
    return True


def _why_not(option: Option, best: Option, stored: str) -> str:
    """The first place where it ranks behind."""
    if option.problem and verdict(option.findings) != verdict(best.findings):
        return option.problem
    ours, theirs = option.rank(stored), best.rank(stored)
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), -1)
    suited = f"{best.scheme} is what decoding needs"
    if best.blocks:
        suited = f"{best.scheme} follows outliers, and the kernel takes it at full speed"
    elif option.blocks:
        suited = f"only {option.blocks:.0%} of the values lie in whole blocks"
    stays = "is what the model has" if stored == best.layout else "is read by more engines"
    return {
        0: option.problem,
        1: f"{option.judgement.kernel}, {option.mode}, against {best.judgement.kernel}, {best.mode}",
        2: "its codes would have to be rounded once more",
        3: f"{option.share:.0%} of the linears in FP8, against {best.share:.0%}",
        4: suited,
        5: "the engine would round scales and codes each time it loads",
        6: f"{best.layout} {stays}",
    }.get(first, "equally good")
