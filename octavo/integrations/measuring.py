"""Models as calibration and evaluation need them: opened by any name a user may give, run on one sample at a time."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from octavo.base.errors import CheckpointError, ConfigError, MismatchError
from octavo.base.log import logger, progress
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe
from octavo.integrations.hub import first_line, load_tokenizer, resolve_model
from octavo.integrations.layers import decoder
from octavo.integrations.load_plan import LoadPlan, sources_on_disk
from octavo.integrations.loading import auto_class, device_of, load_config, load_folder, refuse_other_methods
from octavo.modules.convert import convert
from octavo.modules.divergence import Perplexity, window_nll
from octavo.store.moments import Moments
from octavo.store.run import RunFolder
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# parameter in the model -> names of the modules on disk that make it up: by part (gate, up), by expert
StoredNames = Callable[[str], list[list[str]]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode with its tokenizer. folder: where its weights are; of a run folder, the base's."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def context(self, wanted: int) -> int:
        """`wanted` tokens, or with a warning as many as the model has positions for: beyond them it was not trained."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not positions or wanted <= positions:
            return wanted
        logger().warning("%s has %d positions: a context of that and not of %d tokens", self.folder, positions, wanted)
        return int(positions)

    def require_known(self, samples: Iterable[torch.Tensor]) -> None:
        """MismatchError for tokens, int64, that the model has no embedding for."""
        known = cast(nn.Embedding, self.model.get_input_embeddings()).num_embeddings
        if (largest := max(int(sample.max()) for sample in samples)) >= known:
            what = f"{self.folder}: the tokenizer knows more tokens than the model"
            fix = "Copy the tokenizer that the model was trained with into the folder."
            raise MismatchError(what, got=f"token {largest}, {known} embeddings", fix=fix)


def compute_dtype(name: str, device: str | None) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, float32 on a CPU, where 16-bit arithmetic is slow."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device_of(device).type == "cpu" else torch.bfloat16


def open_model(
    name: str | Path,
    *,
    recipe: Recipe | None = None,
    activation: str | None = None,
    scales: Path | None = None,
    moments: Moments | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Opened:
    """A folder in 16 bit or FP8, a hub id, `demo`, or the run folder of a fine-tune (its base plus its adapter).

    recipe: quantize a 16-bit model while loading; None takes the weights as they are stored, and for a run folder
    quantizes the base as the run did. activation: what FP8 linears do to their inputs; None is what the folder, the
    recipe or the run says. scales: a scales.json, for `static`. moments: for a recipe that rounds with compensation.
    """
    if is_run(name):
        return _open_run(RunFolder(Path(name)), recipe, activation, scales, device, dtype)
    folder = resolve_model(name)
    model = load_base(folder, recipe, device=device, dtype=dtype, activation=activation, scales=scales, moments=moments)
    _require_finite(model, folder)
    return Opened(model.eval(), load_tokenizer(folder), folder)


def _require_finite(model: nn.Module, folder: Path) -> None:
    """CheckpointError that names the weight: what is computed with it is NaN everywhere."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        if not bool(torch.isfinite(torch.stack(parameter.detach().aminmax())).all()):
            bad = torch.nonzero(~torch.isfinite(parameter.detach()))[0].tolist()
            got = f"{float(parameter.detach()[tuple(bad)])} at {bad}"
            fix = "Training diverged, or the file is damaged: take an earlier checkpoint."
            raise CheckpointError(f"{folder}: tensor {name}", got=got, need="finite weights", fix=fix)


def load_merged(folder: Path, recipe: Recipe, *, device: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """The model in 16 bit whose linears round at every call, as `recipe` and a compressed-tensors file have it.

    ConfigError for what an export rounds otherwise: experts in stacks, and scales that fused siblings share.
    """
    checkpoint = Checkpoint.open(folder)
    shapes, layers = checkpoint.shapes(), checkpoint.layers
    plain = recipe.assign(shapes, layers=layers)
    fitted = recipe.assign(shapes, layout="ct", layers=layers, config=checkpoint.text_config)
    where = f"training through the rounding of {folder}"
    if any(found.rule is not None and found.role == "expert" for found in fitted.values()):
        raise ConfigError(where, got="a mixture of experts", need="linears", fix="Use mode lora.")
    if any(found.rule is not None and isinstance(found.rule.granularity, PerTensor) for found in fitted.values()):
        got = "one scale for fused siblings"
        raise ConfigError(where, got=got, need="scales per channel or block", fix="Use --scheme channel.")
    changed = tuple((name, found.rule) for name, found in fitted.items() if found.rule != plain[name].rule)
    recipe = replace(recipe, overrides=(*changed, *recipe.overrides))
    return convert(load_base(folder, None, device=device, dtype=dtype), recipe, trainable=True)


def is_run(name: str | Path) -> bool:
    """Whether this is the run folder of a fine-tune, finished or not."""
    folder = Path(name)
    return RunFolder(folder).config.is_file() and not (folder / "config.json").is_file()


def _open_run(
    run: RunFolder,
    recipe: Recipe | None,
    activation: str | None,
    scales: Path | None,
    device: str | None,
    dtype: torch.dtype,
) -> Opened:
    from octavo.integrations.peft import load_adapter

    run.require_finished()
    settings = run.read_config()
    mode = activation or settings["activation"]
    if recipe is not None:
        fix = "Leave the scheme out, or evaluate the exported checkpoint."
        raise ConfigError(f"run {run.path} has quantized its base itself", got=f"scheme '{recipe.name}'", fix=fix)
    calibrated = settings.get("moments")
    if settings["mode"] != "two-stage":
        rule = {"scale_format": settings["scale_format"], "rounding": "compensated" if calibrated else "nearest"}
        recipe = Recipe.named(settings["scheme"], activation=mode, **rule)
        recipe = run.read_policy().apply(recipe)
        scales = scales or settings["scales"]
    if recipe is not None and settings["mode"] == "fp8-aware":
        folder = resolve_model(settings["model"])
        model = load_merged(folder, recipe, device=device, dtype=dtype)
        return Opened(load_adapter(model, run.adapter).eval(), load_tokenizer(folder), folder)
    static = scales if mode == "static" else None
    moments = Moments.open(calibrated, model=resolve_model(settings["model"])) if calibrated else None
    base = open_model(settings["model"], recipe=recipe, scales=static, moments=moments, device=device, dtype=dtype)
    return Opened(load_adapter(base.model, run.adapter).eval(), base.tokenizer, base.folder)


def is_fp8(folder: Path) -> bool:
    """Whether the weights in a folder are quantized; CheckpointError if it is with anything but FP8."""
    checkpoint = Checkpoint.open(folder)
    refuse_other_methods(checkpoint)
    return "quantization_config" in checkpoint.config or "quantization_config" in checkpoint.text_config


def load_base(
    folder: Path,
    recipe: Recipe | None,
    *,
    device: str | None,
    dtype: torch.dtype,
    activation: str | None = None,
    scales: Scales | Path | None = None,
    moments: Moments | None = None,
) -> PreTrainedModel:
    """The model in `folder`, quantized by `recipe`, or for None as it is stored: FP8, or every weight in `dtype`."""
    place = device_of(device)
    if recipe is not None or is_fp8(folder):
        return load_folder(
            folder, recipe, device=place, dtype=dtype, activation=activation, scales=scales, moments=moments
        )
    if activation not in (None, "none"):
        fix = "Name a scheme, so that its linears are quantized."
        raise ConfigError(f"activation '{activation}'", got=f"{folder} in 16 bit", need="FP8 weights", fix=fix)
    config = load_config(folder)
    settings: dict[str, Any] = {"device_map": {"": place}} if place.type != "cpu" else {}
    try:
        model = auto_class(config).from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, **settings
        )
    except Exception as error:
        raise CheckpointError(f"{folder} does not load in Transformers", got=first_line(error)) from error
    return cast("PreTrainedModel", model)


@torch.no_grad()
def logits(model: nn.Module, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """tokens int64 [T], one sample without padding -> logits [T, V], in the model's dtype. cache: filled if given."""
    device = next(model.parameters()).device
    result: torch.Tensor = model(input_ids=tokens[None].to(device), **_cached(model, cache)).logits[0]
    return result


@torch.no_grad()
def perplexity(model: nn.Module, windows: torch.Tensor, title: str) -> Perplexity:
    """Of a model on windows of tokens, int64 [n, T], in evaluation mode; its own mode is put back. title: the bar's."""
    training = model.training
    model.eval()
    nll = []
    with progress(title, len(windows)) as advance:
        for window in windows:
            found = logits(model, window)
            nll.append(window_nll(found, window))
            advance(1)
    model.train(training)
    return Perplexity.of(nll)


@torch.no_grad()
def run_layers(model: nn.Module, tokens: torch.Tensor, cache: Any = None) -> None:
    """Send one sample, int64 [T], through the decoder layers; the head is left out. cache: filled if given."""
    device = next(model.parameters()).device
    decoder(model)(input_ids=tokens[None].to(device), **_cached(model, cache))


def new_cache(model: nn.Module) -> Any:
    """An empty KV cache for one sample, or None for a model that keeps no keys and values."""
    from transformers import DynamicCache

    if not cache_argument(model):
        return None
    return DynamicCache(config=cast(Any, model).config)


def cache_argument(model: nn.Module) -> str:
    """What the decoder calls its cache: Transformers renamed it on the way from 5.17 to 5.24. Empty: it takes none."""
    known = inspect.signature(decoder(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in known), "")


def stored_names(model: nn.Module, checkpoint: Checkpoint) -> StoredNames:
    """How the checkpoint calls what a parameter of the model is made of."""
    plan = LoadPlan(Recipe(), sources=sources_on_disk(model, checkpoint.names()))
    return lambda parameter: list(plan.disk_modules(parameter).values())


def attention_names(model: nn.Module, stored: StoredNames) -> dict[int, str]:
    """Layer, as caches count layers -> its attention module as the checkpoint calls it."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in found or not re.search(r"att(entio)?n[^.]*$", name):
            continue
        parts = [stored(f"{name}.{child}.weight") for child, _ in module.named_children()]
        plain = [part[0][0] for part in parts if len(part) == 1 and len(part[0]) == 1]
        found[layer] = plain[0].rpartition(".")[0] if plain else name
    return found


def show_experts(model: nn.Module) -> None:
    """Run stacked experts one by one from now on: grouped products do not show which expert was given which input."""
    cast(Any, model).set_experts_implementation("eager")


def _cached(model: nn.Module, cache: Any) -> dict[str, Any]:
    return {"use_cache": False} if cache is None else {"use_cache": True, cache_argument(model): cache}
