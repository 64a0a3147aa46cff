"""What becomes of each module of a Transformers model while its checkpoint streams in.

Transformers knows which tensors on disk make up which parameter; a Recipe decides by the names on disk, as `octavo
quantize` does. The plan joins the two before a single weight is read.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from octavo.base.errors import CheckpointError, ConfigError
from octavo.base.log import logger
from octavo.formats.recipe import Recipe
from octavo.formats.rule import Assignment, Rule
from octavo.modules.convert import is_plain
from octavo.modules.experts import NAMES
from octavo.store.schema import SCALE_NAMES, StoredScheme, parse_quantization_config, read_scaled
from octavo.store.tensors import Checkpoint

# parameter -> (pattern of the converter that makes it, tensor on disk): by pattern in the converter's order, so gate
# before up, and within a pattern in the order in which Transformers hands them over
Sources = dict[str, list[tuple[str | None, str]]]


@dataclass(frozen=True)
class ModulePlan:
    """One linear, or the experts of one layer.

    disk: the module's name on disk where one tensor is the weight, else "". stored: codes are on disk already.
    names: of the three matrices of an expert on disk.
    """

    rule: Rule
    activation: str
    disk: str = ""
    stored: bool = False
    names: tuple[str, str, str] = NAMES


@dataclass
class LoadPlan:
    """modules: plans by module name in the model. assignments: decisions by module name on disk, for the config."""

    recipe: Recipe
    modules: dict[str, ModulePlan] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sources: Sources = field(default_factory=dict)
    scheme: StoredScheme = field(default_factory=lambda: StoredScheme("none"))

    def experts(self, module: str) -> list[str]:
        """`module.E.leaf` of every expert of stacked experts, as moments name them; [] for a linear."""
        found = []
        for leaf in ("gate_up_proj", "down_proj"):
            tensors = [tensor for _, tensor in self.sources.get(f"{module}.{leaf}", ())]
            stacked = len(tensors) == 1 and len(self.shapes[tensors[0]]) == 3
            parts = 2 if leaf == "gate_up_proj" else 1
            count = self.shapes[tensors[0]][0] if stacked else len(tensors) // parts
            found += [f"{module}.{expert}.{leaf}" for expert in range(count)]
        return found

    def disk_modules(self, parameter: str) -> dict[str | None, list[str]]:
        """Pattern -> module names on disk of the tensors behind a parameter, in order."""
        found: dict[str | None, list[str]] = {}
        for pattern, tensor in self.sources.get(parameter, ()):
            found.setdefault(pattern, []).append(tensor.removesuffix(".weight"))
        return found


def make_plan(
    model: nn.Module,
    checkpoint: Checkpoint | None,
    recipe: Recipe | None,
    activation: str | None,
    calibrated: Container[str] | None = None,
) -> LoadPlan:
    """Decide for a model on the meta device. recipe None: what the checkpoint stores, else `channel`.

    calibrated: the modules that can be rounded with compensation; a warning counts the others.
    ConfigError if the checkpoint stores FP8 in another way than `recipe` asks for, or if nothing is to be quantized.
    """
    scheme = parse_quantization_config(checkpoint.config) if checkpoint else StoredScheme("none")
    recipe = _stored_recipe(scheme, recipe) if scheme.groups else recipe or Recipe.named("channel")
    shapes = checkpoint.shapes() if checkpoint else {n: tuple(p.shape) for n, p in model.named_parameters()}
    sources = sources_on_disk(model, list(shapes))
    plan = LoadPlan(recipe, {}, {}, dict(shapes), sources, scheme)
    plan.assignments = recipe.assign(shapes, layers=checkpoint.layers if checkpoint else None)
    if checkpoint is not None and scheme.groups:
        _take_stored(plan, checkpoint)
    mode = activation or recipe.activation
    tied = _tied(model)
    linears = {n: m for n, m in model.named_modules() if n and is_plain(m) and f"{n}.weight" not in tied}
    decisions = recipe.assign({f"{n}.weight": tuple(m.weight.shape) for n, m in linears.items()})
    for name in linears:
        _plan_linear(plan, name, decisions[name], activation)
    for name, module in model.named_modules():
        if is_stacked_experts(module):
            _plan_experts(plan, name, module, mode)
    if checkpoint is not None:
        _refuse_lost_codes(plan, checkpoint)
    _nearest_elsewhere(plan, calibrated or ())
    if not plan.modules:
        what = f"recipe '{recipe.name}' quantizes no module of {type(model).__name__}"
        raise ConfigError(what, got=f"{len(linears)} linear layers", fix="Check its skip patterns.")
    return plan


def is_stacked_experts(module: nn.Module) -> bool:
    """Experts as Transformers 5 keeps them: 3-D parameters gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    stacks = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks)


def unsupported_experts(module: nn.Module) -> str:
    """Why stacked experts stay in 16 bit, or "": other layouts than plain gate and up, then down, without a bias."""
    reasons = {
        "is_transposed": "its matrices are stored transposed",
        "has_bias": "its experts have biases",
        "has_post_expert_norm": "its experts end in a norm",
    }
    for flag, reason in reasons.items():
        if getattr(module, flag, False):
            return reason
    if not getattr(module, "has_gate", True) or not getattr(module, "is_concatenated", True):
        return "gate and up are not two halves of one matrix"
    gate = getattr(type(module), "_apply_gate", None)
    if not callable(getattr(module, "act_fn", None)) or getattr(gate, "__name__", "") != "_default_apply_gate":
        return "its activation is not act(gate) * up"
    return ""


def stored_modules(checkpoint: Checkpoint) -> Iterator[str]:
    """Modules whose weight on disk is FP8 already."""
    for name in checkpoint.names():
        if name.endswith(".weight") and checkpoint.dtype(name) == torch.float8_e4m3fn:
            yield name.removesuffix(".weight")


def _nearest_elsewhere(plan: LoadPlan, calibrated: Container[str]) -> None:
    """Linears without moments are rounded to nearest, with a warning; of experts, the streamer decides one by one."""
    nearest = []
    for name, module in plan.modules.items():
        if module.rule.rounding == "nearest" or (module.disk or name) in calibrated:
            continue
        parts = plan.experts(name)
        nearest += [part for part in parts if part not in calibrated] if parts else [name]
        if not parts:
            plan.modules[name] = replace(module, rule=module.rule.rounded("nearest"))
    if nearest:
        what = "%d linears have no calibrated inputs, or too few, and are rounded to nearest, such as %s"
        logger().warning(what, len(nearest), nearest[0])


def _stored_recipe(scheme: StoredScheme, wanted: Recipe | None) -> Recipe:
    group = scheme.groups[0]
    rule = Rule(granularity=group.granularity)
    if wanted is not None and (wanted.compensated or wanted.rule.granularity != group.granularity):
        raise ConfigError(
            f"recipe '{wanted.name}', rounding '{wanted.rule.rounding}'",
            got=f"a checkpoint that holds FP8 with scales per {group.granularity} already",
            fix="Leave the recipe out to take what is stored, or give the original 16-bit model.",
        )
    activation = wanted.activation if wanted else group.activation
    return Recipe("stored", rule, activation)


def _take_stored(plan: LoadPlan, checkpoint: Checkpoint) -> None:
    """An FP8 checkpoint has decided: FP8 where its files hold FP8, 16 bit elsewhere."""
    for module, decision in plan.assignments.items():
        plan.assignments[module] = Assignment(None, decision.role, "16 bit in the checkpoint")
    for module in stored_modules(checkpoint):
        rule = Rule(granularity=read_scaled(checkpoint, module, plan.scheme).granularity)
        plan.assignments[module] = Assignment(rule, plan.assignments[module].role, "FP8 in the checkpoint")


def _plan_linear(plan: LoadPlan, name: str, by_model_name: Assignment, activation: str | None) -> None:
    found = plan.sources.get(f"{name}.weight", [])
    plain = len(found) == 1 and found[0][0] is None
    disk = found[0][1].removesuffix(".weight") if plain else ""
    decision = plan.assignments[disk] if plain else by_model_name
    stored = plain and bool(plan.scheme.groups)
    if decision.rule is None or (plan.scheme.groups and not stored):
        return
    mode = activation or plan.recipe.activation
    if stored and activation is None and (group := plan.scheme.group_of(disk)) is not None:
        mode = group.activation
    plan.modules[name] = ModulePlan(decision.rule, mode, disk, stored)


def _plan_experts(plan: LoadPlan, name: str, module: nn.Module, mode: str) -> None:
    behind = {leaf: plan.disk_modules(f"{name}.{leaf}") for leaf in ("gate_up_proj", "down_proj")}
    modules = [m for by_pattern in behind.values() for group in by_pattern.values() for m in group]
    rules = {plan.assignments[m].rule for m in modules}
    reason = unsupported_experts(module)
    if not reason and len(rules) > 1:
        reason = "the recipe does not treat all of its experts alike"
    if reason or not modules or rules == {None}:
        if reason and rules != {None}:
            logger().warning("%s stays in 16 bit: %s", name, reason)
        for m in modules:
            plan.assignments[m] = Assignment(None, "expert", reason or plan.assignments[m].reason)
        return
    leaves = [p for by_pattern in behind.values() for p in by_pattern if p is not None]
    names = tuple(pattern.rpartition("*.")[2].removesuffix(".weight") for pattern in leaves)
    rule = next(iter(rules))
    assert rule is not None
    kept = (names[0], names[1], names[2]) if len(names) == 3 else NAMES
    plan.modules[name] = ModulePlan(rule, mode, stored=bool(plan.scheme.groups), names=kept)


def _refuse_lost_codes(plan: LoadPlan, checkpoint: Checkpoint) -> None:
    """FP8 codes that no FP8 module takes would be read as plain numbers, without their scales."""
    taken = {module.disk for module in plan.modules.values() if module.stored}
    for name, module in plan.modules.items():
        if module.stored and not module.disk:
            for leaf in ("gate_up_proj", "down_proj"):
                taken.update(m for group in plan.disk_modules(f"{name}.{leaf}").values() for m in group)
    for tensor in checkpoint.names():
        if checkpoint.dtype(tensor).itemsize == 1 and checkpoint.dtype(tensor).is_floating_point:
            module_name = tensor.removesuffix(".weight")
            if module_name not in taken and not tensor.endswith(SCALE_NAMES):
                what = f"{checkpoint.folder}: tensor {tensor} holds FP8 codes"
                fix = "Give the original 16-bit model."
                raise CheckpointError(what, need="a linear layer of this model to hold them", fix=fix)


def _tied(model: nn.Module) -> set[str]:
    """Parameters that share their memory with another one."""
    keys = getattr(model, "all_tied_weights_keys", None) or {}
    return {*keys, *keys.values()} if isinstance(keys, Mapping) else set()


def sources_on_disk(model: Any, tensors: list[str]) -> Sources:
    """Which tensors on disk make up which parameter, by Transformers' own renaming."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    table: Mapping[str, torch.Tensor] = model.state_dict()
    prefix = model.base_model_prefix
    sources: Sources = {}
    for tensor in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(tensor, renamings, converters, prefix, table)
        if target not in table and tensor in table:
            target, pattern = tensor, None
        sources.setdefault(target, []).append((pattern, tensor))
    order = {pattern: index for converter in converters for index, pattern in enumerate(converter.source_patterns)}
    for found in sources.values():
        found.sort(key=lambda item: order.get(item[0], 0))
    return sources
