"""LoRA of PEFT over FrozenFloat8Linear: adapters train in high precision, a merge requantizes instead of losing them.

PEFT takes FrozenFloat8Linear for an nn.Linear and would read its codes as weights. What that breaks was measured with
peft 0.21: merge raises a dtype error, safe_merge returns without an error and without the adapter, DoRA takes the norm
of the raw bytes. So the LoRA layer here has its own merge, and FrozenFloat8Linear refuses the others by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from peft import get_peft_model as peft_get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from transformers import PreTrainedModel

from octavo.base.errors import ConfigError, RefusedError, did_you_mean
from octavo.formats.architectures import ADAPTED_STACKS
from octavo.formats.measure import delta_kept
from octavo.formats.scaled import ScaledTensor
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.linear import Float8Linear
from octavo.ops.quantize import dequantize, quantize

KEPT_WARNING = 0.9
# Initialisations that do not look at the base weight.
INITS = (True, False, "gaussian")


class Float8LoraLinear(LoraLinear):  # type: ignore[misc]
    """y = base(x) + scaling * B(A(dropout(x))); base: FrozenFloat8Linear, A and B in PEFT's adapter dtype.

    kept: after a merge, the share of the adapter's change that the codes took up (formats.measure.delta_kept).
    """

    kept: float | None = None
    _unmerged: ScaledTensor | None = None
    _unmerged_bias: torch.Tensor | None = None

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        check_config(config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Requantize base + adapters with the base's own rule; `unmerge` gives the old codes back bit for bit.

        Always as safe as PEFT's safe_merge: RefusedError for NaN or Inf, before anything is changed. Small changes are
        mostly lost on a coarse grid: a warning below 90 %, `kept` has the number.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) or [] if n in self.lora_A]
        if not names:
            return
        base = cast(FrozenFloat8Linear, self.base_layer)
        before = self._unmerged or _copy(base.scaled())
        weight = dequantize(before)
        target, bias = weight.clone(), None
        for name in (*self.merged_adapters, *names):
            target += self.get_delta_weight(name).float()
            if self.lora_bias[name]:
                bias = self._bias(name, bias)
        if not torch.isfinite(target).all():
            raise RefusedError(
                f"merging adapter {', '.join(names)}", got="NaN or Inf in the sum", fix="Train again or drop it."
            )
        codes = quantize(target, base.rule.rounded("nearest"))
        self.kept = delta_kept(weight, target, codes)
        if self._unmerged is None:
            self._unmerged = before
            self._unmerged_bias = None if base.bias is None else base.bias.detach().clone()
        base.load_scaled(codes)
        if bias is not None and base.bias is not None:
            base.bias.copy_(bias)
        self.merged_adapters.extend(names)
        base.adapter_kept = self.kept
        if self.kept < KEPT_WARNING:
            warnings.warn(
                "merging into FP8 codes lost more than a tenth of the adapter in at least one layer; "
                "octavo.integrations.peft.kept(model) lists the layers, octavo export merges onto the original weights",
                stacklevel=2,
            )

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put back the codes from before the first merge."""
        if self._unmerged is None:
            warnings.warn("nothing is merged into this layer", stacklevel=2)
            return
        base = cast(FrozenFloat8Linear, self.base_layer)
        base.load_scaled(self._unmerged)
        if self._unmerged_bias is not None and base.bias is not None:
            base.bias.copy_(self._unmerged_bias)
        self.merged_adapters.clear()
        self._unmerged = self._unmerged_bias = self.kept = base.adapter_kept = None

    def _bias(self, name: str, so_far: torch.Tensor | None) -> torch.Tensor:
        base = cast(FrozenFloat8Linear, self.base_layer)
        start = self._unmerged_bias if self._unmerged_bias is not None else base.bias
        if start is None:
            raise RefusedError(f"merging adapter {name}", got="an adapter with a bias", need="a base layer with a bias")
        extra = self.lora_B[name].bias.float() * self.scaling[name]
        return cast(torch.Tensor, (start.float() if so_far is None else so_far) + extra)


class MergedLoraLinear(LoraLinear):  # type: ignore[misc]
    """y = x W^T + bias with W = base weight + scaling * B A, rounded to FP8 at every call: the base is a Float8Linear.

    What trains is what octavo export writes: it adds in float32 too, and rounds to nearest by the same rule. Gradients
    pass the rounding unchanged. Costs the gradient of a whole weight, and a rounding, per layer and pass.
    """

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        check_config(config)
        if config.lora_dropout:
            fix = "Leave lora_dropout out."
            raise ConfigError("lora_dropout over Float8Linear", got="a sum that cannot be dropped in part", fix=fix)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = cast(Float8Linear, self.base_layer)
        if self.disable_adapters or self.merged:
            return cast(torch.Tensor, base(x))
        weight = base.weight.float()
        with torch.autocast(x.device.type, enabled=False):  # exports add in float32
            for name in self.active_adapters:
                if name in self.lora_A:
                    a, b = self.lora_A[name].weight.float(), self.lora_B[name].weight.float()
                    weight = weight + self.scaling[name] * (b @ a)
        return base.with_weight(x, weight)


def register(config: LoraConfig) -> LoraConfig:
    """Tell this config to build our LoRA layers over our linears; checks it first. Returns the same object."""
    check_config(config)
    config._register_custom_module({FrozenFloat8Linear: Float8LoraLinear, Float8Linear: MergedLoraLinear})
    return config


def get_peft_model(model: nn.Module, config: LoraConfig, **options: Any) -> PeftModel:
    """peft.get_peft_model over an Octavo model, with a LoRA layer that can merge. options: of PEFT's function.

    ConfigError for what cannot work over FP8 codes: DoRA and initialisations that read the base weight.
    """
    with _one_name_too_old():
        return peft_get_peft_model(model, register(config), **options)


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
        return PeftModel.from_pretrained(model, str(folder), is_trainable=trainable, config=register(config))


def kept(model: nn.Module) -> dict[str, float]:
    """Layer -> share of the adapter's change its codes took up, for every layer a LoRA was merged into."""
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, FrozenFloat8Linear) and module.adapter_kept is not None:
            names[name.removesuffix(".base_layer")] = module.adapter_kept
    return names


def check_config(config: LoraConfig) -> None:
    """ConfigError where the LoRA variant would read FP8 codes as if they were weights."""
    if config.use_dora:
        raise ConfigError(
            "use_dora: DoRA rescales by the norm of the base weight on every step",
            got="FP8 codes as the base weight",
            need="LoRA",
            fix="Leave it out; use_rslora is fine, or train on the 16-bit model with mode two-stage.",
        )
    if config.init_lora_weights not in INITS:
        raise ConfigError(
            f"init_lora_weights: '{config.init_lora_weights}' changes or decomposes the base weight",
            got="FP8 codes, which stay as they are",
            need="True or gaussian",
            fix="PiSSA, OLoRA, orthogonal, LoftQ and their like belong to the 16-bit model.",
        )


def adapted_layers(model: nn.Module) -> list[str]:
    """Names of the layers that carry an adapter, as in the base model."""
    prefix = "base_model.model."
    found = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    return [name.removeprefix(prefix) for name in found]


def _copy(q: ScaledTensor) -> ScaledTensor:
    return ScaledTensor(q.codes.detach().clone(), q.scale.detach().clone(), q.spec, q.granularity)


@contextmanager
def _one_name_too_old() -> Iterator[None]:
    """PEFT asks a Transformers model by a name that 5.24 renamed; not a matter for the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
