"""convert: replace the linear layers of a model in memory by FP8 ones, as a recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from octavo.base.errors import ConfigError, require_type
from octavo.base.log import logger
from octavo.formats.architectures import PLAIN_LINEARS, fused_group
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.rule import Assignment, Rule
from octavo.formats.scale import scale_of
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.linear import Float8Linear

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    recipe: Recipe | str = "channel",
    *,
    activation: str | None = None,
    input_scales: Mapping[str, float] | None = None,
    trainable: bool = False,
) -> Model:
    """Quantize the linear layers that `recipe` names, in place, one at a time. Returns the model.

    recipe: a Recipe or the name of a preset. activation: instead of the recipe's: `none` keeps activations as they
    are, the others imitate what an engine does to them. input_scales: module name -> scale, for `static`.
    trainable: keep the weights as they are and quantize them at every call (Float8Linear).
    Only plain nn.Linear layers are taken; a weight that two modules share stays as it is. ConfigError where `static`
    lacks a scale or the recipe takes no layer at all.
    """
    require_type("convert: model", model, nn.Module)
    require_type("convert: recipe", recipe, Recipe, str)
    chosen = Recipe.named(recipe) if isinstance(recipe, str) else recipe
    mode = activation or chosen.activation
    linears = {name: module for name, module in model.named_modules() if name and is_plain(module)}
    decisions = assignments(model, chosen)
    taken = {name: d.rule for name, d in decisions.items() if d.rule is not None and name in linears}
    if not taken:
        raise ConfigError("convert", got=f"{len(linears)} linear layers, none taken by '{chosen.name}'", need="one")
    missing = [name for name in taken if mode == "static" and name not in (input_scales or {})]
    if missing:
        what = f"activation 'static': no input scale for {missing[0]} and {len(missing) - 1} more"
        raise ConfigError(what, fix="Calibrate the model, or use activation 'token'.")
    scales = _shared_scales(linears, taken)
    for name, rule in taken.items():
        if trainable:
            model.set_submodule(name, Float8Linear.from_linear(linears[name], rule, mode))
            continue
        input_scale = (input_scales or {})[name] if mode == "static" else None
        scale = scales.get(name)
        new = FrozenFloat8Linear.from_linear(linears[name], rule, mode, input_scale=input_scale, scale=scale)
        model.set_submodule(name, new)
    logger().info(
        "converted %d of %d linear layers to FP8%s", len(taken), len(linears), " per call" if trainable else ""
    )
    return model


def assignments(model: nn.Module, recipe: Recipe) -> dict[str, Assignment]:
    """What `recipe` decides for each linear layer of a model in memory; layers that share a weight stay."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    shapes = {f"{n}.weight": tuple(m.weight.shape) for n, m in model.named_modules() if is_plain(m)}
    decisions = recipe.assign(shapes)
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            if name in decisions and decisions[name].rule is not None:
                reason = f"shares its weight with {', '.join(n for n in names if n != name)}"
                decisions[name] = Assignment(None, decisions[name].role, reason)
    return decisions


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing more."""
    return type(module) is nn.Linear or type(module).__name__ in PLAIN_LINEARS


def _shared_scales(linears: Mapping[str, nn.Linear], taken: Mapping[str, Rule]) -> dict[str, torch.Tensor]:
    """One scale for fused siblings with per-tensor scales, as engines need it and exports have it."""
    scales: dict[str, torch.Tensor] = {}
    for name, rule in taken.items():
        group = [m for m in (fused_group(name) or ("", (name,)))[1] if m in taken]
        if name in scales or len(group) < 2 or not isinstance(rule.granularity, PerTensor):
            continue
        amax = torch.stack([rule.granularity.amax(linears[m].weight.detach()) for m in group]).max()
        scales.update(dict.fromkeys(group, scale_of(amax, rule.spec, rule.scale_format)))
    return scales
