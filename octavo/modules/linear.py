"""Float8Linear: a trainable high-precision weight, quantized at every call. The reference of FP8 training."""

from __future__ import annotations

import torch
from torch import nn

from octavo.base.errors import ConfigError
from octavo.formats.granularity import Granularity, PerGroup, PerRow
from octavo.formats.rule import Rule
from octavo.ops.linear import check_activation
from octavo.ops.quantize import fake_quantize

ACTIVATION_RULES: dict[str, Granularity] = {"token": PerRow(), "group128": PerGroup(128)}


class Float8Linear(nn.Linear):
    """y = fq(x) @ fq(weight)^T + bias, where fq quantizes to FP8 and back.

    rule: of the weight. activation: of x: `none`, `token` or `group128` (`static` would need a scale that follows
    training). Gradients pass the two fq unchanged (straight-through): dX = dY @ fq(W), dW = dY^T @ fq(x). The
    weight keeps its dtype and is what the optimizer updates; products are taken in the dtype of x, or autocast's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rule: Rule | None = None,
        activation: str = "token",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set(rule, activation)

    @classmethod
    def from_linear(cls, linear: nn.Linear, rule: Rule | None = None, activation: str = "token") -> Float8Linear:
        """Take over the parameters of a linear layer: the same objects, so optimizers keep them."""
        new = cls(linear.in_features, linear.out_features, False, rule=rule, activation=activation, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.with_weight(x, self.weight)

    def with_weight(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """y for another weight [N, K] of any float dtype, which is quantized in that dtype; differentiable in it."""
        if self.activation != "none":
            x = fake_quantize(x, self.input_rule)
        return nn.functional.linear(x, fake_quantize(weight, self.rule).to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rule={self.rule}, activation={self.activation}"

    def _set(self, rule: Rule | None, activation: str) -> None:
        check_activation(activation)
        if activation == "static":
            raise ConfigError("Float8Linear, activation 'static'", need="none, token or group128")
        self.rule, self.activation = rule or Rule(), activation
        self.input_rule = Rule(granularity=ACTIVATION_RULES.get(activation, PerRow()))
