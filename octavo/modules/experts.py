"""FrozenFloat8Experts: the experts of a mixture-of-experts layer as stacked FP8 codes; the router stays in 16 bit.

Shapes: E experts, H hidden size, I intermediate size, T tokens, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import nn

from octavo.base.errors import ConfigError, ShapeError
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.modules.frozen import FrozenParameter, move_only
from octavo.modules.guard import refuse_adapters_of_experts
from octavo.ops.linear import apply, check_activation

NAMES = ("gate_proj", "up_proj", "down_proj")


class FrozenFloat8Experts(nn.Module):
    """sum over a token's experts of weight * down(act(gate(x)) * up(x)), differentiable in x and in the weights.

    gate_up_proj: uint8 [E, 2I, H], gate rows above up rows. down_proj: uint8 [E, H, I].
    gate_up_proj_scale: float32 [E, 2, *scale of an [I, H] matrix]; down_proj_scale: float32 [E, 1, *scale of [H, I]].
    No scale spans two experts, nor gate and up. names: of an expert's three matrices in files.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        *,
        rule: Rule | None = None,
        activation: str = "none",
        names: tuple[str, str, str] = NAMES,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        if activation == "static":
            raise ConfigError("stacked experts with static activation scales", fix="Use activation 'token' or 'none'.")
        self.num_experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self.act_fn, self.rule, self.activation, self.names = act_fn, rule or Rule(), activation, names
        shapes = {"gate_up_proj": (2, intermediate, hidden), "down_proj": (1, hidden, intermediate)}
        for name, (shards, rows, cols) in shapes.items():
            codes = torch.zeros((experts, shards * rows, cols), dtype=torch.uint8, device=device)
            scale_shape = (experts, shards, *self.rule.granularity.scale_shape((rows, cols)))
            self.register_parameter(name, FrozenParameter(codes))
            ones = torch.ones(scale_shape, dtype=torch.float32, device=device)
            self.register_parameter(f"{name}_scale", FrozenParameter(ones))

    @property
    def base_layer(self) -> NoReturn:
        """Absent: as in FrozenFloat8Linear, who asks for it on behalf of an adapter is refused."""
        refuse_adapters_of_experts()
        raise AttributeError(f"'{type(self).__name__}' object has no attribute 'base_layer'")

    def scaled(self, expert: int) -> dict[str, ScaledTensor]:
        """One expert's matrices by their names in files; they share the module's memory."""
        gate, up, down = self.names
        return {
            gate: self._matrix("gate_up_proj", expert, 0),
            up: self._matrix("gate_up_proj", expert, 1),
            down: self._matrix("down_proj", expert, 0),
        }

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [T, H], indices int64 [T, k], weights [T, k] -> [T, H]. An index of E or more chooses no expert."""
        if hidden_states.dim() != 2 or top_k_index.shape != top_k_weights.shape:
            got = f"x {list(hidden_states.shape)}, indices {list(top_k_index.shape)}, {list(top_k_weights.shape)}"
            raise ShapeError("FrozenFloat8Experts", got=got, need="x [T, H], indices and weights [T, k]")
        result = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.num_experts:
                continue
            token, slot = torch.where(top_k_index == expert)
            gate, up, down = self.scaled(expert).values()
            x = hidden_states[token]
            y = self._product(self.act_fn(self._product(x, gate)) * self._product(x, up), down)
            y = y * top_k_weights[token, slot, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result

    def extra_repr(self) -> str:
        size = f"experts={self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}"
        return f"{size}, rule={self.rule}, activation={self.activation}"

    def _matrix(self, name: str, expert: int, shard: int) -> ScaledTensor:
        codes, scale = self.get_parameter(name).detach()[expert], self.get_parameter(f"{name}_scale").detach()
        rows = codes.shape[0] // scale.shape[1]
        part = codes[shard * rows : (shard + 1) * rows]
        return ScaledTensor(part, scale[expert, shard], self.rule.spec, self.rule.granularity)

    def _product(self, x: torch.Tensor, q: ScaledTensor) -> torch.Tensor:
        return apply(x, q.codes, q.scale, None, None, q.spec.name, q.granularity.tile, self.activation, "auto")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FrozenFloat8Experts:
        """Codes and scales move and are never cast."""
        for name, parameter in list(self._parameters.items()):
            if parameter is None:
                continue
            moved = move_only(fn, parameter)
            if torch._has_compatible_shallow_copy_type(parameter, moved):
                parameter.data = moved
            else:
                self._parameters[name] = FrozenParameter(moved)
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        return self
