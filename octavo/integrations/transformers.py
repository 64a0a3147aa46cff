"""octavo.load: any Transformers causal language model, straight to FP8 while it streams from safetensors."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from octavo.base.errors import require_type
from octavo.formats.recipe import Recipe
from octavo.integrations.hub import resolve_model
from octavo.integrations.loading import device_of, load_folder
from octavo.integrations.moments import moments_for
from octavo.store.moments import Moments
from octavo.store.policy import Policy
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from octavo.integrations.float8_cache import Float8Cache as Float8Cache


def load(
    model: str | Path,
    recipe: Recipe | str | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    activation: str | None = None,
    scales: Scales | Path | str | None = None,
    rounding: str | None = None,
    moments: Moments | Path | str | None = None,
    data: str | None = None,
    samples: int = 128,
    context: int = 512,
    weighting: str = "fisher",
    policy: Path | str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model with its linears and experts in FP8, ready to generate, to take LoRA adapters, or to be saved.

    model: a folder, a hub id, or `demo`. recipe: a Recipe, the name of a preset, or None: what an FP8 checkpoint
    stores (its codes are taken as they are), else `channel`. device: default the first GPU, else the CPU.
    dtype: of everything that is not FP8; default the checkpoint's 16-bit type, else bfloat16.
    activation: what the linears do to their inputs: `none`, `token`, `group128` or `static`; None is the recipe's mode,
    what an engine would do. `static` needs `scales` or a checkpoint that stores input scales.
    rounding: `nearest` or `compensated`; None is the recipe's. `compensated` needs `moments`, the folder of
    `octavo calibrate --moments`, or `data` to calibrate on first: `samples` of `context` tokens, `weighting` as there.
    policy: policy.json of this model, from `octavo tune`: layers that stay in 16 bit or take another scheme.

    Peak memory: the FP8 model and its largest tensor; files are mapped, never read whole. `save_pretrained` writes a
    compressed-tensors checkpoint that needs no Octavo.

    CheckpointError: files missing, damaged, NaN, or quantized by another method. ConfigError: an unknown recipe or
    setting. MismatchError: scales or a policy of another model. RefusedError: the model needs remote code and
    `trust_remote_code` is off. UnsupportedError: a model type that the installed Transformers does not know, or no such
    device.
    """
    require_type("load: recipe", recipe, Recipe, str, NoneType)
    folder = resolve_model(model, trust_remote_code=trust_remote_code)
    tuned = Policy.load(policy, model=Checkpoint.open(folder)) if policy is not None else None
    recipe = _chosen(recipe, tuned, rounding)
    place = device_of(device)
    wanted = "compensated" if isinstance(recipe, Recipe) and recipe.compensated else "nearest"
    calibration: dict[str, Any] = {"samples": samples, "context": context, "weighting": weighting, "device": str(place)}
    with moments_for(wanted, folder, moments=moments, data=data, **calibration) as found:
        how: dict[str, Any] = {"dtype": dtype, "activation": activation, "scales": scales, "moments": found}
        return load_folder(folder, recipe, device=place, trust_remote_code=trust_remote_code, **how)


def _chosen(recipe: Recipe | str | None, tuned: Policy | None, rounding: str | None) -> Recipe | str | None:
    """The recipe with what a policy and a rounding of one's own change about it."""
    if tuned is not None and recipe is None:
        recipe = tuned.scheme or "channel"
    if rounding is not None:
        named = recipe if isinstance(recipe, Recipe) else Recipe.named(recipe or "channel")
        recipe = replace(named, rule=named.rule.rounded(rounding))
    if tuned is not None:
        recipe = tuned.apply(Recipe.named(recipe) if isinstance(recipe, str) else recipe or Recipe())
    return recipe


def __getattr__(name: str) -> object:
    """Float8Cache is a class of Transformers', which is not imported before it is asked for."""
    if name != "Float8Cache":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return import_module("octavo.integrations.float8_cache").Float8Cache
