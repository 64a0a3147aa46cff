"""LoRA of PEFT over FP8 models: adapters in high precision, a merge that requantizes, layers fused where possible."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel
from peft import get_peft_model as peft_get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from octavo.base.errors import ConfigError, did_you_mean
from octavo.formats.architectures import ADAPTED_STACKS
from octavo.integrations.drop_in import fuse_in_training
from octavo.integrations.lora_layer import Float8LoraLinear, MergedLoraLinear, check_config
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.linear import Float8Linear


def register(config: LoraConfig) -> LoraConfig:
    """Tell this config to build our LoRA layers over our linears; checks it first. Returns the same object."""
    check_config(config)
    config._register_custom_module({FrozenFloat8Linear: Float8LoraLinear, Float8Linear: MergedLoraLinear})
    return config


def get_peft_model(model: nn.Module, config: LoraConfig, **options: Any) -> PeftModel:
    """peft.get_peft_model over an Octavo model, with a LoRA layer that can merge. options: of PEFT's function.

    ConfigError for what cannot work over FP8 codes: adapters other than LoRA, DoRA, initialisations that read the base
    weight, modules_to_save that are FP8.
    """
    register(config)
    _refuse_training_codes(model, config.modules_to_save or ())
    with _one_name_too_old():
        adapted = peft_get_peft_model(model, config, **options)
    fuse_in_training(adapted)
    return adapted


def _refuse_training_codes(model: nn.Module, modules_to_save: Collection[str]) -> None:
    """ConfigError where PEFT would train a copy of a module that holds FP8 codes, which have no gradient."""
    for name, module in model.named_modules():
        for wanted in modules_to_save:
            if name.endswith(wanted) and any(isinstance(m, FrozenFloat8Linear) for m in module.modules()):
                fix = f"Adapt it with target_modules, or keep it in 16 bit: skip=('*{wanted}',) of the recipe."
                raise ConfigError(f"modules_to_save: '{wanted}'", got="FP8 codes, which do not train", fix=fix)


def lora_config(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    rslora: bool = False,
    gaussian: bool = False,
    target_modules: Collection[str] = (),
) -> LoraConfig:
    """A LoraConfig for a Transformers model. target_modules: names or their ends; none: every linear but the head,
    and over FP8 experts, which cannot be adapted, none of an MLP that PEFT would take for them.

    ConfigError for a name that fits no linear layer, and for the head or the embeddings, which stay as they are.
    """
    linears = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()
    ]
    for target in target_modules:
        if any(name == target or name.endswith("." + target) for name in linears):
            continue
        known = {name.rpartition(".")[2] for name in linears}
        everything = {name for name, _ in model.named_modules()}
        if any(name == target or name.endswith("." + target) for name in everything):
            raise ConfigError(f"target_modules: '{target}' takes no adapter", need=", ".join(sorted(known)))
        raise ConfigError(f"target_modules: the model has no '{target}'", fix=did_you_mean(target, known))
    if not target_modules and _would_adapt_codes(model):
        target_modules = sorted({name.rpartition(".")[2] for name in linears if ".mlp." not in name})
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        use_rslora=rslora,
        init_lora_weights="gaussian" if gaussian else True,
        target_modules=list(target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )


def _would_adapt_codes(model: nn.Module) -> bool:
    """Whether `all-linear` would reach experts that are FP8 codes."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind in ADAPTED_STACKS and any(isinstance(module, FrozenFloat8Experts) for module in model.modules())


def load_adapter(model: nn.Module, folder: Path | str, *, trainable: bool = False) -> PeftModel:
    """PeftModel.from_pretrained over an Octavo model."""
    config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    config.inference_mode = not trainable
    with _one_name_too_old():
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=trainable, config=register(config))
    fuse_in_training(adapted)
    return adapted


def kept(model: nn.Module) -> dict[str, float]:
    """Layer -> share of the adapter's change its codes took up, for every layer a LoRA was merged into."""
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, FrozenFloat8Linear) and module.adapter_kept is not None:
            names[name.removesuffix(".base_layer")] = module.adapter_kept
    return names


def adapted_layers(model: nn.Module) -> list[str]:
    """Names of the layers that carry an adapter, as in the base model."""
    prefix = "base_model.model."
    found = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    return [name.removeprefix(prefix) for name in found]


@contextmanager
def _one_name_too_old() -> Iterator[None]:
    """PEFT asks a Transformers model by a name that 5.24 renamed; not a matter for the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
