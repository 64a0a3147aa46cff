"""The quantizer that Transformers calls: FP8 while `from_pretrained` streams, compressed-tensors when it saves.

Importing this module registers it, once per process; `octavo.OctavoConfig` does. It works with the hooks that
Transformers 5.17 and 5.24 share.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from octavo.base.errors import CheckpointError, ConfigError, OctavoError
from octavo.base.log import logger
from octavo.formats.fitting import unfit
from octavo.formats.recipe import Recipe
from octavo.integrations.drop_in import fuse_in_training
from octavo.integrations.load_plan import LoadPlan, make_plan
from octavo.integrations.streaming import Streamer, unfilled
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.rounding import Compensator
from octavo.store.moments import Moments
from octavo.store.scales import Scales
from octavo.store.schema import scale_to_file, to_quantization_config
from octavo.store.tensors import Checkpoint

METHOD = "octavo"
_STACKS = ("gate_up_proj", "down_proj")


@register_quantization_config(METHOD)
class OctavoConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`AutoModelForCausalLM.from_pretrained(folder, quantization_config=OctavoConfig("channel"))`.

    recipe: a Recipe, the name of a preset, or None: what an FP8 checkpoint stores, else `channel`.
    activation: what the linears do to their inputs here, instead of the recipe's mode; files keep the recipe's.
    skip: patterns of modules that stay in 16 bit, added to the recipe's. scales: a scales.json, for `static`.
    moments: of `octavo calibrate --moments`, for a recipe whose rounding is `compensated`.
    Once a model is loaded, `to_dict()` is the compressed-tensors configuration of what is in memory.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = "channel",
        activation: str | None = None,
        skip: tuple[str, ...] = (),
        scales: Scales | Path | str | None = None,
        moments: Moments | Path | str | None = None,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise ConfigError(
                "OctavoConfig", got=", ".join(unknown), need="recipe, activation, skip, scales or moments"
            )
        chosen = Recipe.named(recipe) if isinstance(recipe, str) else recipe
        if skip:
            base = chosen or Recipe.named("channel")
            chosen = Recipe(base.name, base.rule, base.activation, (*base.skip, *skip), base.overrides)
        if activation is not None:
            Recipe(activation=activation)  # an unknown mode is an error here, not after the download
        if chosen is not None and chosen.compensated and moments is None:
            fix = "Give the moments of octavo calibrate --moments, or call octavo.load with data."
            raise ConfigError("rounding 'compensated'", got="no moments", fix=fix)
        self.quant_method = METHOD
        self.recipe, self.activation, self.scales, self.moments = chosen, activation, scales, moments
        self.saved_as: dict[str, Any] | ConfigError | None = None
        self.problems: list[OctavoError] = []

    def to_dict(self) -> dict[str, Any]:
        if isinstance(self.saved_as, dict):
            return copy.deepcopy(self.saved_as)
        name = self.recipe.name if self.recipe else None
        return {"quant_method": METHOD, "recipe": name, "activation": self.activation}


class _Unmerged(ConversionOps):  # type: ignore[misc]
    """In place of stacking experts in 16 bit: hand them on one by one. Layers that are not planned are stacked."""

    def __init__(self, operations: list[Any], planned: frozenset[str]) -> None:
        self.operations, self.planned = operations, planned

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **kwargs: Any) -> dict[str, Any]:
        if full_layer_name.rpartition(".")[0] in self.planned:
            return input_dict
        for operation in self.operations:
            input_dict = operation.convert(input_dict, full_layer_name=full_layer_name, **kwargs)
        return input_dict

    @property
    def reverse_op(self) -> _Unmerged:
        return _Unmerged([operation.reverse_op for operation in reversed(self.operations)], frozenset())


class _ToFloat8(ConversionOps):  # type: ignore[misc]
    """What Transformers calls with every tensor of a planned module."""

    def __init__(self, quantizer: OctavoQuantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, missing_keys: set[str] | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        try:
            return self.quantizer.arrived(full_layer_name, input_dict)
        except OctavoError as error:
            # Transformers turns whatever is raised here into a line of its report: kept for `load` to raise.
            self.quantizer.quantization_config.problems.append(error)
            raise


@register_quantizer(METHOD)
class OctavoQuantizer(HfQuantizer):  # type: ignore[misc]
    """Glue: Transformers names the tensors and sets the parameters, the plan decides, the streamer makes codes."""

    requires_calibration = False
    quantization_config: OctavoConfig
    plan: LoadPlan
    streamer: Streamer
    unserved: dict[str, str]

    def __deepcopy__(self, memo: dict[int, Any]) -> OctavoQuantizer:
        return self  # converters are copied for each parameter, and with them their operations

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            raise CheckpointError(
                "quant_method 'octavo' in config.json",
                need="the files that save_pretrained writes",
                fix="Save it again.",
            )

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        folder = Path(checkpoint_files[0]).parent if checkpoint_files else None
        checkpoint = Checkpoint.open(folder) if folder and (folder / "config.json").is_file() else None
        scales, moments = config.scales, config.moments
        with torch.device("cpu"):  # Transformers builds the model under torch.device("meta"), and files are real
            if isinstance(scales, str | Path):
                scales = Scales.load(Path(scales), model=checkpoint)
            if isinstance(moments, str | Path):
                moments = Moments.open(moments, model=checkpoint)
            self.plan = make_plan(model, checkpoint, config.recipe, config.activation, moments)
        self.streamer = Streamer(self.plan, checkpoint, scales, Compensator(moments) if moments else None)
        for name, module in list(model.named_modules()):
            if name in self.plan.modules:
                model.set_submodule(name, self._replacement(name, module))
        if self.plan.scheme.groups:
            known = model._keys_to_ignore_on_load_unexpected or ()
            scale_keys = {r"(\.weight|_proj)_scale(_inv)?$", r"\.(input|k|v)_scale$"}
            model._keys_to_ignore_on_load_unexpected = {*known, *scale_keys}

    def _replacement(self, name: str, module: nn.Module) -> nn.Module:
        plan = self.plan.modules[name]
        with torch.device("meta"):
            if isinstance(module, nn.Linear):
                sizes, bias = (module.in_features, module.out_features), module.bias is not None
                dtype = module.weight.dtype
                new: nn.Module = FrozenFloat8Linear(
                    *sizes, bias, rule=plan.rule, activation=plan.activation, dtype=dtype
                )
                placeholders: tuple[str, ...] = ("weight",)
            else:
                experts, hidden, intermediate = module.get_parameter("down_proj").shape
                dtype = module.get_parameter("down_proj").dtype
                new = FrozenFloat8Experts(
                    experts,
                    hidden,
                    intermediate,
                    module.act_fn,  # type: ignore[arg-type]
                    rule=plan.rule,
                    activation=plan.activation,
                    names=plan.names,
                )
                placeholders = _STACKS
            for leaf in placeholders:
                # Transformers 5.17 casts what it reads to the placeholder's dtype before our operation sees it.
                shape = new.get_parameter(leaf).shape
                new._parameters[leaf] = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        return new.train(module.training)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Experts are not stacked before they are quantized: a layer of them in 16 bit is more than one tensor."""
        experts = [name for name, plan in self.plan.modules.items() if not plan.disk]
        stacks = [f"{name}.{leaf}" for name in experts for leaf in _STACKS]
        patterns = {pattern for stack in stacks for pattern in self.plan.disk_modules(stack)}
        result = []
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and patterns & set(conversion.source_patterns):
                copied = WeightConverter(
                    list(conversion._original_source_patterns),
                    list(conversion._original_target_patterns),
                    operations=[_Unmerged(list(conversion.operations), frozenset(experts))],
                )
                copied.scope_prefix, copied.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
                conversion = copied
            result.append(conversion)
        return result

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, _, leaf = param_name.rpartition(".")
        return module in self.plan.modules and leaf != "bias"

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        leaf = param_name.rpartition(".")[2]
        planned = self.param_needs_quantization(model, param_name) and leaf in ("weight", *_STACKS)
        return 1.0 if planned else float(param.element_size())

    def get_quantize_ops(self) -> _ToFloat8:
        return _ToFloat8(self)

    def arrived(self, name: str, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Tensors for the parameter `name`: one under its own name, or lists of experts by converter pattern."""
        module, _, leaf = name.rpartition(".")
        if leaf.endswith("_scale"):
            return {}  # comes with its weight; Transformers 5.17 takes an expert's for a weight
        if leaf in _STACKS and not self.plan.modules[module].disk:
            found = list(tensors.values())
            stack = found[0][0] if isinstance(found[0], list) else found[0]
            if stack.dim() == 3:
                halves = stack.chunk(2, dim=1) if leaf == "gate_up_proj" else (stack,)
                return self.streamer.experts(module, leaf, [list(half.unbind(0)) for half in halves])
            by_pattern = [tensors[str(pattern)] for pattern in self.plan.disk_modules(name)]
            return self.streamer.experts(module, leaf, by_pattern)
        result: dict[str, torch.Tensor] = {}
        for key, value in tensors.items():
            tensor = value[0] if isinstance(value, list) else value
            owner, _, leaf = key.rpartition(".")
            if owner not in self.plan.modules or leaf == "bias":
                result[key] = tensor
            elif leaf == "weight":
                result |= self.streamer.linear(owner, tensor)
        return result

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        missing = [name for name in unfilled(model) if name not in self.streamer.held]
        if missing:
            what = f"{self.streamer.checkpoint.folder if self.streamer.checkpoint else 'the checkpoint'} lacks weights"
            raise CheckpointError(what, got=f"nothing for {missing[0]} and {len(missing) - 1} more modules")
        config = self.quantization_config
        try:
            config.saved_as = to_quantization_config(
                self.plan.assignments, self.plan.recipe, "ct", shapes=self.plan.shapes
            )
        except ConfigError as error:  # fine in memory, no engine could read it from a file
            config.saved_as = error
        text = self.streamer.checkpoint.text_config if self.streamer.checkpoint else {}
        self.unserved = unfit(self.plan.assignments, self.plan.shapes, self.plan.recipe.activation, text)
        linear = {p for name in self.plan.modules for p in self.plan.disk_modules(f"{name}.weight")}
        # Undone on saving, these would join codes and leave their scales apart: such weights keep the model's names.
        kept = [c for c in model._weight_conversions if not linear & set(c.source_patterns)]
        model._weight_conversions = kept
        self.streamer.checkpoint = self.streamer.solve = None
        fuse_in_training(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What save_pretrained writes: float8 weights with their scales, experts one by one."""
        if isinstance(self.quantization_config.saved_as, ConfigError):
            raise self.quantization_config.saved_as
        if self.unserved:
            module, reason = next(iter(self.unserved.items()))
            logger().warning(
                "%d modules of this file will load in Octavo, not in vLLM or SGLang (%s: %s). "
                "For those: octavo requantize FOLDER OUT --for vllm:GPU",
                len(self.unserved),
                module,
                reason,
            )
        return float8_state_dict(model), {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def float8_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with codes as float8 and scales as compressed-tensors stores them, by names in the model."""
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, FrozenFloat8Linear):
            q = module.scaled()
            state[f"{prefix}weight"] = q.as_float8()
            state[f"{prefix}weight_scale"] = scale_to_file(q.scale, q.granularity, "ct")
        elif isinstance(module, FrozenFloat8Experts):
            for leaf in _STACKS:
                del state[prefix + leaf], state[f"{prefix}{leaf}_scale"]
            for expert in range(module.num_experts):
                for leaf, q in module.scaled(expert).items():
                    state[f"{prefix}{expert}.{leaf}.weight"] = q.as_float8()
                    state[f"{prefix}{expert}.{leaf}.weight_scale"] = scale_to_file(q.scale, q.granularity, "ct")
    return state
