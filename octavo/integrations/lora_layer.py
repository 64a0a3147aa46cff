"""PEFT's LoRA layers over FP8 linears: adapters train in high precision, a merge requantizes instead of losing them.

PEFT takes FrozenFloat8Linear for an nn.Linear and would read its codes as weights. What that breaks was measured with
peft 0.21: merge raises a dtype error, safe_merge returns without an error and without the adapter, DoRA takes the norm
of the raw bytes. So the LoRA layer here has its own merge, and FrozenFloat8Linear refuses the others by itself.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from peft import LoraConfig, PeftType
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import check_adapters_to_merge

from octavo.base.errors import ConfigError, RefusedError
from octavo.formats.measure import delta_kept
from octavo.formats.scaled import ScaledTensor
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


def check_config(config: LoraConfig) -> None:
    """ConfigError where this is no LoRA, or a variant that would read FP8 codes as if they were weights."""
    if config.peft_type != PeftType.LORA:
        kind = type(config).__name__
        fix = "Prompts and prefixes, which change no linear layer, are given to peft.get_peft_model."
        raise ConfigError(f"{kind} over FP8 codes", need="a LoraConfig", fix=fix)
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


def _copy(q: ScaledTensor) -> ScaledTensor:
    return ScaledTensor(q.codes.detach().clone(), q.scale.detach().clone(), q.spec, q.granularity)
