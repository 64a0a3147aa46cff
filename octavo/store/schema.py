"""The only file that knows how engines spell FP8: quantization_config, names and shapes of scale tensors. Names of
modules in it are in targets.py.

Layouts on disk:
    ct        compressed-tensors, format float-quantized: `weight_scale` [N, 1], [1] or [N/128, K/128]
    native    quant_method fp8 (DeepSeek, Qwen): `weight_scale_inv` for blocks, scalar `weight_scale` per tensor
    modelopt  read only: `weight_scale`, scalar, [N] or blocks
All of them multiply: x ~ code * scale, `_inv` too. Scales are FP32.

The dict for ct is built here and proven by tests against compressed_tensors' own models (`validate_ct`), which are not
imported on the way: importing them imports transformers, longer than a small conversion takes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.base.errors import CheckpointError, ConfigError
from octavo.base.report import UNREADABLE, read_json
from octavo.formats.fitting import SERVABLE, served_activation
from octavo.formats.granularity import Granularity, PerBlock, PerRow, PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.rule import Assignment
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.store.targets import group_targets
from octavo.store.targets import skip_list as skip_list
from octavo.store.targets import spellings as spellings
from octavo.store.tensors import Checkpoint

LAYOUTS = ("ct", "native")
INPUT_SCALE = "input_scale"
SCALE_NAMES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class StoredGroup:
    """One way of quantizing. targets: class names, full module names, or `re:` and a regular expression."""

    granularity: Granularity
    activation: str
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class StoredScheme:
    """What a quantization_config says. layout: ct, native, modelopt, or none for a model in 16 bit."""

    layout: str
    groups: tuple[StoredGroup, ...] = ()
    skip: tuple[str, ...] = ()
    kv_cache: bool = False

    def group_of(self, module: str) -> StoredGroup | None:
        """The group of a module that is not skipped: by its name first, then by its class, as engines do."""
        named = [g for g in self.groups if any(_names(target, module) for target in g.targets)]
        return next(iter(named + [g for g in self.groups if "Linear" in g.targets]), None)

    def skips(self, module: str, engine: str | None = None) -> bool:
        """Whether a module stays in 16 bit, as `engine` reads the list (None: as the layout's own library does)."""
        return any(skip_matches(self.layout, engine, pattern, module) for pattern in self.skip)


def skip_matches(layout: str, engine: str | None, pattern: str, module: str) -> bool:
    """The same entry of a skip list means different things to different engines.

    ct: the exact name, or `re:`. native: vllm takes the exact name, sglang whole dotted segments anywhere (with and
    without `model.`), transformers a prefix up to a dot, a regular expression up to a dot, or a suffix.
    modelopt: a substring or a glob.
    """
    if layout == "ct":
        return _names(pattern, module)
    if layout == "modelopt":
        return pattern in module or fnmatch.fnmatchcase(module, pattern)
    if engine == "vllm":
        return pattern == module
    if engine == "sglang":
        return any(f".{name}.".find(f".{pattern}.") >= 0 for name in (module, "model." + module))
    try:
        found = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None
    except re.error:
        found = False
    return found or module.endswith(pattern)


def to_quantization_config(
    assignments: Mapping[str, Assignment],
    recipe: Recipe,
    layout: str,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Any]:
    """The quantization_config for a checkpoint whose modules were assigned these rules.

    shapes (tensor name -> shape): leaves norms and biases of towers out of the skip list.
    """
    check_layout(layout, recipe)
    skip = skip_list(assignments, shapes, layout)
    if layout == "native":
        block = recipe.rule.granularity
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if recipe.activation == "static" else "dynamic",
            "weight_block_size": [block.rows, block.cols] if isinstance(block, PerBlock) else None,
            "modules_to_not_convert": skip,
        }
    kinds: dict[tuple[Granularity, str], list[str]] = {}
    for module, decision in assignments.items():
        if decision.rule is not None:
            kind = decision.rule.granularity, activation_of(decision, recipe, layout)
            kinds.setdefault(kind, []).append(module)
    # The class last: compressed_tensors stops at the first target that matches, and warns about every name behind it.
    main = recipe.rule.granularity, recipe.activation
    kinds[main] = kinds.pop(main, [])
    groups = {}
    for index, ((granularity, activation), modules) in enumerate(kinds.items()):
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if (granularity, activation) == main else group_targets(modules, assignments),
            "weights": _ct_weights(granularity),
            "input_activations": _ct_activation(activation),
            "output_activations": None,
            "format": "float-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": groups,
        "ignore": skip,
        "kv_cache_scheme": None,
    }


def activation_of(decision: Assignment, recipe: Recipe, layout: str) -> str:
    """What a file declares for the inputs of a quantized module."""
    assert decision.rule is not None
    if decision.activation is not None:
        return decision.activation
    expert = decision.role == "expert"
    return served_activation(decision.rule.granularity, recipe.activation, expert=expert, layout=layout)


def check_layout(layout: str, recipe: Recipe) -> None:
    """ConfigError for what a layout cannot hold or no engine runs."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout '{layout}' is unknown", fix=f"Known: {', '.join(LAYOUTS)}.")
    granularity = recipe.rule.granularity
    if recipe.rule.spec != E4M3:
        raise ConfigError(f"weights in {recipe.rule.spec}", need="e4m3: engines load no other", fix="Use spec E4M3.")
    if granularity.name not in SERVABLE or (isinstance(granularity, PerBlock) and granularity != PerBlock(128, 128)):
        raise ConfigError(f"weight scales per {granularity} in a file", need="row, tensor or block128x128")
    if recipe.activation not in SERVABLE[granularity.name]:
        need = " or ".join(SERVABLE[granularity.name])
        raise ConfigError(f"activation mode '{recipe.activation}' with weight scales per {granularity}", need=need)
    for pattern, rule in recipe.overrides:
        other = rule.granularity if rule else granularity
        if layout == "native" and other != granularity:
            got = f"scales per {granularity}, and per {other} for {pattern}"
            raise ConfigError(
                "layout native", got=got, need="one kind of scales for all modules", fix="Use --layout ct."
            )
        if other.name not in SERVABLE or (isinstance(other, PerBlock) and other != PerBlock(128, 128)):
            raise ConfigError(f"weight scales per {other} for {pattern} in a file", need="row, tensor or block128x128")
    if layout == "native" and granularity.name == "row":
        fix = "Use --layout ct, or scheme block128 or tensor."
        raise ConfigError("layout native with one scale per channel", need="block or tensor scales", fix=fix)
    if layout == "native" and recipe.activation == "none":
        fix = "Use --layout ct, whose input_activations may be null."
        raise ConfigError("layout native, weight-only", got="no way to write it", fix=fix)


def _ct_weights(granularity: Granularity) -> dict[str, Any]:
    strategy = {"row": "channel", "tensor": "tensor", "block": "block"}[granularity.name]
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if isinstance(granularity, PerBlock):
        args["block_structure"] = [granularity.rows, granularity.cols]
    return args


def _ct_activation(mode: str) -> dict[str, Any] | None:
    if mode == "none":
        return None
    strategy = {"static": "tensor", "token": "token", "group128": "group"}[mode]
    dynamic = mode != "static"
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic}
    if mode == "group128":
        args["group_size"] = 128
    return args


def validate_ct(config: Mapping[str, Any]) -> None:
    """Let compressed_tensors' own models judge a ct quantization_config. ConfigError with its first complaint."""
    from compressed_tensors.quantization import QuantizationConfig

    try:
        QuantizationConfig.model_validate(dict(config))
    except (ValueError, NotImplementedError, KeyError) as error:
        raise ConfigError("quantization_config", got=" ".join(str(error).split())[:300]) from None


def stored_quantization(checkpoint: Checkpoint) -> dict[str, Any]:
    """The quantization_config of a folder, from wherever it is: config.json, the language model's part of it, or
    ModelOpt's hf_quant_config.json. {} for a model in 16 bit; CheckpointError for a file that cannot be read."""
    for config in (checkpoint.config, checkpoint.text_config):
        for key in ("quantization_config", "compression_config"):
            if config.get(key):
                return config[key] if isinstance(config[key], dict) else {"quant_method": None}
    path = checkpoint.folder / "hf_quant_config.json"
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        raise CheckpointError(f"{path}", got=" ".join(str(error).split())[:200], need="JSON") from None
    inner = value.get("quantization") if isinstance(value, dict) else None
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else {}


def parse_quantization_config(config: Mapping[str, Any]) -> StoredScheme:
    """config.json, or its quantization_config, -> what the files hold. CheckpointError for methods that are not FP8."""
    inner = config if "quant_method" in config else config.get("quantization_config", config.get("compression_config"))
    if not inner:
        return StoredScheme("none")
    method = inner.get("quant_method") if isinstance(inner, Mapping) else None
    parsers = {"compressed-tensors": _parse_ct, "fp8": _parse_native, "modelopt": _parse_modelopt}
    if not isinstance(inner, Mapping) or method not in parsers:
        got = f"quant_method {method!r}"
        raise CheckpointError("quantization_config", got=got, need="FP8: compressed-tensors, fp8 or modelopt")
    try:
        return parsers[str(method)](inner)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError("quantization_config", got=f"a malformed value ({error!r})") from None


def _parse_ct(config: Mapping[str, Any]) -> StoredScheme:
    groups = []
    for name, group in config["config_groups"].items():
        weights, inputs = group["weights"], group.get("input_activations")
        if weights.get("num_bits", 8) != 8 or weights.get("type") != "float":
            got = f"{weights.get('num_bits', 8)} bit {weights.get('type')}"
            raise CheckpointError(f"quantization_config {name}: weights", got=got, need="8 bit float")
        strategy = weights.get("strategy", "tensor")
        if strategy == "block":
            granularity: Granularity = PerBlock(*weights["block_structure"])
        elif strategy in ("tensor", "channel"):
            granularity = PerTensor() if strategy == "tensor" else PerRow()
        else:
            raise CheckpointError(f"quantization_config {name}: strategy", got=strategy, need="tensor, channel, block")
        activation = "none"
        if inputs:
            activation = {"token": "token", "group": "group128"}.get(inputs.get("strategy"), "static")
            if activation == "static" and inputs.get("dynamic"):
                activation = "token"
        groups.append(StoredGroup(granularity, activation, tuple(group["targets"])))
    skip = tuple(config.get("ignore") or ())
    return StoredScheme("ct", tuple(groups), skip, bool(config.get("kv_cache_scheme")))


def _parse_native(config: Mapping[str, Any]) -> StoredScheme:
    block = config.get("weight_block_size")
    static = config.get("activation_scheme") == "static"
    granularity = PerBlock(*block) if block else PerTensor()
    activation = "static" if static else "group128" if block else "token"
    skip = tuple(config.get("ignored_layers") or config.get("modules_to_not_convert") or ())
    return StoredScheme(
        "native", (StoredGroup(granularity, activation),), skip, bool(config.get("kv_cache_quant_algo"))
    )


def _parse_modelopt(config: Mapping[str, Any]) -> StoredScheme:
    inner = config.get("quantization", config)
    known: dict[str, tuple[Granularity, str]] = {
        "FP8": (PerTensor(), "static"),
        "FP8_PER_CHANNEL_PER_TOKEN": (PerRow(), "token"),
        "FP8_PB_WO": (PerBlock(128, 128), "group128"),
    }
    if inner.get("quant_algo") not in known:
        raise CheckpointError("quantization_config quant_algo", got=str(inner.get("quant_algo")), need=", ".join(known))
    skip = tuple(inner.get("exclude_modules") or inner.get("ignore") or ())
    kv_cache = bool(inner.get("kv_cache_quant_algo") or inner.get("kv_cache_scheme"))
    return StoredScheme("modelopt", (StoredGroup(*known[inner["quant_algo"]]),), skip, kv_cache)


def scale_name(module: str, granularity: Granularity, layout: str) -> str:
    """`a.b` -> `a.b.weight_scale`, or `a.b.weight_scale_inv` for blocks in the native layout."""
    native_block = layout == "native" and isinstance(granularity, PerBlock)
    return f"{module}.{'weight_scale_inv' if native_block else 'weight_scale'}"


def file_scale_shape(shape: tuple[int, ...], granularity: Granularity, layout: str) -> tuple[int, ...]:
    """The shape of the scale tensor of a [N, K] weight on disk: ct stores a per-tensor scale as [1], native as []."""
    return (1,) if isinstance(granularity, PerTensor) and layout == "ct" else granularity.scale_shape(shape)


def scale_to_file(scale: torch.Tensor, granularity: Granularity, layout: str) -> torch.Tensor:
    """A ScaledTensor's scale as the layout stores it: FP32, the same values."""
    return scale.reshape(1) if isinstance(granularity, PerTensor) and layout == "ct" else scale


def scale_from_file(
    stored: torch.Tensor, granularity: Granularity, layout: str, shape: tuple[int, ...], name: str
) -> torch.Tensor:
    """A stored scale -> FP32 of shape granularity.scale_shape(shape). CheckpointError naming the tensor otherwise."""
    want = granularity.scale_shape(shape)
    fits = tuple(stored.shape) == want or (not want and tuple(stored.shape) == (1,))
    if layout == "modelopt":
        fits = fits or stored.numel() == torch.Size(want).numel()
    if not fits:
        need = f"{list(want) or '[] or [1]'} for a {list(shape)} weight with scales per {granularity}"
        raise CheckpointError(f"tensor {name}", got=f"shape {list(stored.shape)}", need=need)
    if not stored.dtype.is_floating_point:
        raise CheckpointError(f"tensor {name}", got=str(stored.dtype), need="a floating-point scale")
    return stored.float().reshape(want)


def stored_scale_name(checkpoint: Checkpoint, module: str) -> str | None:
    """The scale tensor that a module has on disk, whatever its shard, or None."""
    return next((f"{module}.{leaf}" for leaf in SCALE_NAMES if f"{module}.{leaf}" in checkpoint), None)


def read_scaled(checkpoint: Checkpoint, module: str, scheme: StoredScheme | None = None) -> ScaledTensor:
    """The codes and scale of one FP8 module; codes are a view of the file. CheckpointError naming the tensor at fault.

    scheme: the checkpoint's, parsed once by the caller; None parses it here.
    """
    scheme = scheme or parse_quantization_config(stored_quantization(checkpoint))
    weight = checkpoint.get(f"{module}.weight")
    if weight.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"tensor {module}.weight", got=str(weight.dtype), need="float8_e4m3fn")
    name = stored_scale_name(checkpoint, module)
    if name is None:
        fix = "Fetch all shards again; the codes mean nothing without it."
        raise CheckpointError(f"module {module}", got="FP8 codes without a scale in any shard", fix=fix)
    group = scheme.group_of(module)
    if group is None:
        raise CheckpointError(f"module {module}", got="FP8 codes that no group of quantization_config covers")
    scale = scale_from_file(checkpoint.get(name), group.granularity, scheme.layout, tuple(weight.shape), name)
    return ScaledTensor(weight.view(torch.uint8), scale, E4M3, group.granularity)


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module
