"""FrozenFloat8Linear: a linear layer that keeps the bytes of a checkpoint. What LoRA and export stand on.

To PEFT it is an nn.Linear. The weight is a uint8 Parameter: float8 parameters are cast by `.to(dtype)`, refused by
gloo and by autocast's machinery. Codes and float32 scales keep their dtype through `.to()`, `.half()`, `.float()`,
deepcopy, state_dict, DDP and FSDP2; only the bias follows a dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from octavo.base.errors import ConfigError, ShapeError
from octavo.formats.rows import as_rows
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.modules.guard import refuse_readers_of_codes
from octavo.ops.linear import apply, check_activation
from octavo.ops.quantize import dequantize, quantize

FROZEN = ("weight", "weight_scale", "input_scale")


class FrozenParameter(nn.Parameter):
    """A parameter without a gradient. `requires_grad_(True)` on the whole model leaves it alone."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> FrozenParameter:
        return super().__new__(cls, data, False)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenParameter:
        return self


class FrozenFloat8Linear(nn.Linear):
    """y = x @ (decode(weight) * weight_scale)^T + bias, differentiable in x and in the bias.

    weight: uint8 [out_features, in_features], codes of `rule.spec`.
    weight_scale: float32, of the shape of the rule's granularity; [1] for one scale per tensor, since FSDP2 takes no
        parameter without a dimension.
    input_scale: float32 [1] where `activation` is `static`, else None.
    bias: [out_features] of `dtype` or None, frozen too.
    compute_dtype: the dtype that 16-bit neighbours have (PEFT reads it for its adapters); follows `.to(dtype)`.
    adapter_kept: after an adapter was merged into the codes, the share of its change that they took up.
    The result has the dtype of x, or autocast's.
    """

    compute_dtype: torch.dtype = torch.bfloat16
    adapter_kept: float | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        rule: Rule | None = None,
        activation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make, and initialize, a float weight
        check_activation(activation)
        self.in_features, self.out_features = in_features, out_features
        self.rule, self.activation, self.compute_dtype = rule or Rule(), activation, dtype
        shape = (out_features, in_features)
        scale_shape = self.rule.granularity.scale_shape(shape) or (1,)
        self.weight = FrozenParameter(torch.zeros(shape, dtype=torch.uint8, device=device))
        self.weight_scale = FrozenParameter(torch.ones(scale_shape, dtype=torch.float32, device=device))
        self.input_scale: nn.Parameter | None
        self.register_parameter("input_scale", None)
        if activation == "static":
            self.input_scale = FrozenParameter(torch.ones(1, dtype=torch.float32, device=device))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), requires_grad=False)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rule: Rule | None = None,
        activation: str = "none",
        *,
        input_scale: torch.Tensor | float | None = None,
        scale: torch.Tensor | None = None,
    ) -> FrozenFloat8Linear:
        """Quantize a linear layer's weight. The bias is shared, not copied. scale: see `octavo.quantize`."""
        q = quantize(linear.weight.detach(), rule, scale=scale)
        new = cls.from_scaled(q, linear.bias, activation, linear.weight.dtype, input_scale=input_scale, rule=rule)
        return new.train(linear.training)

    @classmethod
    def from_scaled(
        cls,
        q: ScaledTensor,
        bias: torch.Tensor | None = None,
        activation: str = "none",
        dtype: torch.dtype = torch.bfloat16,
        *,
        input_scale: torch.Tensor | float | None = None,
        rule: Rule | None = None,
    ) -> FrozenFloat8Linear:
        """Hold the codes and scales of q [N, K], not copied. rule: how they were made, where q does not say it all."""
        if q.codes.dim() != 2:
            raise ShapeError("FrozenFloat8Linear", got=str(list(q.shape)), need="a matrix [N, K]")
        if (activation == "static") != (input_scale is not None):
            raise ConfigError(
                f"FrozenFloat8Linear, activation '{activation}'",
                got="no input_scale" if input_scale is None else "an input_scale",
                need="input_scale for 'static' and only then",
                fix="Calibrate to get one.",
            )
        rule = rule or Rule(q.spec, q.granularity)
        new = cls(q.shape[1], q.shape[0], rule=rule, activation=activation, device="meta", dtype=dtype)
        new.weight = FrozenParameter(q.codes.contiguous())
        new.weight_scale = FrozenParameter(q.scale.reshape(new.weight_scale.shape))
        if input_scale is not None:
            scale = torch.as_tensor(input_scale, dtype=torch.float32, device=q.codes.device)
            new.input_scale = FrozenParameter(scale.detach().reshape(1).clone())
        if bias is not None:
            new.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return new

    def scaled(self) -> ScaledTensor:
        """The weight as a ScaledTensor that shares the layer's memory."""
        scale = self.weight_scale.detach()
        granularity = self.rule.granularity
        want = granularity.scale_shape((self.out_features, self.in_features))
        return ScaledTensor(self.weight.detach(), scale.reshape(want), self.rule.spec, granularity)

    @torch.no_grad()
    def load_scaled(self, q: ScaledTensor) -> None:
        """Copy codes and scales of the layer's own spec, granularity and shape over the present ones."""
        if (q.spec, q.granularity, q.shape) != (self.rule.spec, self.rule.granularity, self.weight.shape):
            got = f"{q.spec} {q.granularity} {list(q.shape)}"
            need = f"{self.rule.spec} {self.rule.granularity} {list(self.weight.shape)}"
            raise ShapeError("FrozenFloat8Linear.load_scaled", got=got, need=need)
        self.weight.copy_(q.codes)
        self.weight_scale.copy_(q.scale.reshape(self.weight_scale.shape))

    @torch.no_grad()
    def to_rows(self) -> int:
        """Scales per block, powers of two, become scales per row in place; how many codes changed (formats.rows)."""
        q, changed = as_rows(self.scaled())
        self.rule = self.rule.per(q.granularity)
        self.weight.copy_(q.codes)
        self.weight_scale = FrozenParameter(q.scale)
        return changed

    @property
    def base_layer(self) -> NoReturn:
        """Absent, as in any layer that wraps no other. Asking lets the layer refuse what would read its codes."""
        refuse_readers_of_codes()
        raise AttributeError(f"'{type(self).__name__}' object has no attribute 'base_layer'")

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [N, K] in `dtype` (default compute_dtype)."""
        return dequantize(self.scaled(), dtype or self.compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tile = self.rule.granularity.tile
        if self.weight_scale.dtype != torch.float32:
            raise ConfigError(
                "FrozenFloat8Linear: something cast weight_scale",
                got=str(self.weight_scale.dtype),
                need="torch.float32",
                fix="With FSDP2, use no MixedPrecisionPolicy param_dtype, or put the scales into ignored_params.",
            )
        scale = self.weight_scale if tile != (0, 0) else self.weight_scale.reshape(())
        input_scale = self.input_scale.reshape(()) if self.input_scale is not None else None
        return apply(x, self.weight, scale, self.bias, input_scale, self.rule.spec.name, tile, self.activation, "auto")

    def reset_parameters(self) -> None:
        """A frozen weight has no initialization: codes become zeros, scales ones."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight_scale.fill_(1.0)

    def extra_repr(self) -> str:
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{size}, rule={self.rule}, activation={self.activation}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FrozenFloat8Linear:
        """nn.Module's one way to move and cast. Codes and scales move and are never cast."""
        with self._without_frozen() as frozen:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, parameter in frozen.items():
            moved = move_only(fn, parameter)
            if torch._has_compatible_shallow_copy_type(parameter, moved):
                parameter.data = moved
            else:
                self._parameters[name] = FrozenParameter(moved)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    @contextmanager
    def _without_frozen(self) -> Iterator[dict[str, nn.Parameter]]:
        everything = dict(self._parameters)
        frozen = {name: everything[name] for name in FROZEN if everything.get(name) is not None}
        for name in frozen:
            self._parameters[name] = None
        yield frozen  # type: ignore[misc]
        self._parameters.update(frozen)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Float8 codes are taken as bytes. A 16-bit weight would be cast to bytes without a word: refused."""
        state_dict = dict(state_dict)
        for name in FROZEN:
            value = state_dict.get(prefix + name)
            if value is None:
                continue
            if name == "weight" and value.dtype == self.rule.spec.dtype:
                state_dict[prefix + name] = value = value.view(torch.uint8)
            want = torch.uint8 if name == "weight" else torch.float32
            if value.dtype != want:
                error_msgs.append(f"{prefix}{name}: got {value.dtype}; need {want}. Quantize it first.")
                return
            if name != "weight":
                state_dict[prefix + name] = value.reshape(value.shape or (1,))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in FROZEN:
            parameter = self._parameters.get(name)
            if parameter is not None and type(parameter) is nn.Parameter:  # what assign=True leaves
                self._parameters[name] = FrozenParameter(parameter.data)


def move_only(fn: Callable[[torch.Tensor], torch.Tensor], parameter: nn.Parameter) -> torch.Tensor:
    """What `fn` makes of a parameter, with the parameter's dtype: a cast only moves."""
    with torch.no_grad():
        moved = fn(parameter.data)
    return moved if moved.dtype == parameter.dtype else parameter.data.to(moved.device)
