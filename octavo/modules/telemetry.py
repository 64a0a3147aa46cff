"""FP8 health of a model that runs: how much of each quantized input saturates or vanishes. Off until asked for.

    with Telemetry(model, every=16) as telemetry:
        train()
    for name, health in telemetry.read().items(): ...

Every 16th call of a layer is looked at; the counts stay on the device until `read`, so nothing waits for the GPU. While
torch.compile traces, the hooks do nothing: compiled layers are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from octavo.base.errors import ConfigError
from octavo.formats.scale import scale_of
from octavo.formats.spec import E4M3
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.linear import Float8Linear
from octavo.ops.reference import ACTIVATION_GRANULARITY


@dataclass(frozen=True)
class LayerHealth:
    """Counts over the values of the inputs looked at, and the largest finite magnitude among them."""

    values: int = 0
    saturated: int = 0  # finite and beyond 448 * scale: cut off
    underflowed: int = 0  # not zero, but its code is
    nonfinite: int = 0  # Inf or NaN
    amax: float = 0.0

    @property
    def saturation(self) -> float:
        """Share of the values, 0 to 1."""
        return self.saturated / self.values if self.values else 0.0

    @property
    def underflow(self) -> float:
        """Share of the values, 0 to 1."""
        return self.underflowed / self.values if self.values else 0.0


class Telemetry:
    """Counts for every FP8 linear whose activation is quantized. every: look at each n-th call of a layer."""

    def __init__(self, model: nn.Module, every: int = 16) -> None:
        if every < 1:
            raise ConfigError("Telemetry: every", got=str(every), need="at least 1")
        self.every = every
        self._counts: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._hooks = [
            module.register_forward_pre_hook(self._hook(name, module.activation))
            for name, module in model.named_modules()
            if isinstance(module, FrozenFloat8Linear | Float8Linear) and module.activation != "none"
        ]
        if not self._hooks:
            raise ConfigError("Telemetry", got="no FP8 layer that quantizes its input", need="at least one")

    def read(self) -> dict[str, LayerHealth]:
        """What has been counted since the start or the last `reset`, by module name. Waits for the device."""
        found = {}
        for name, counts in self._counts.items():
            values, saturated, underflowed, nonfinite, amax = counts.tolist()
            found[name] = LayerHealth(int(values), int(saturated), int(underflowed), int(nonfinite), amax)
        return found

    def reset(self) -> None:
        """Start counting anew."""
        self._counts.clear()
        self._calls.clear()

    def close(self) -> None:
        """Remove the hooks; what was counted stays readable."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _hook(self, name: str, activation: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            if torch.compiler.is_compiling():
                return
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            if call % self.every or not args[0].numel():
                return
            with torch.no_grad():
                counts = count_input(args[0], activation, module._parameters.get("input_scale"))
                total = self._counts.get(name)
                if total is not None:
                    counts = torch.cat([total[:-1] + counts[:-1], torch.maximum(total[-1:], counts[-1:])])
                self._counts[name] = counts

        return look


def count_input(x: torch.Tensor, activation: str, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [5] on x's device: values, saturated, underflowed, non-finite, amax, as `activation` quantizes x."""
    x = x.detach().reshape(-1, x.shape[-1]).float()
    granularity = ACTIVATION_GRANULARITY[activation]
    scale = input_scale.reshape(()) if input_scale is not None else scale_of(granularity.amax(x), E4M3)
    wide = granularity.expand(scale, tuple(x.shape))
    finite, size = torch.isfinite(x), x.abs()
    saturated = finite & (size > E4M3.max * wide)
    # Half the smallest subnormal is a tie, and even: it rounds to zero.
    underflowed = (size > 0) & (size <= E4M3.min_subnormal / 2 * wide)
    amax = torch.where(finite, size, torch.zeros_like(size)).amax()
    values = torch.full_like(amax, x.numel(), dtype=torch.float64)
    return torch.stack([values, saturated.sum(), underflowed.sum(), (~finite).sum(), amax]).double()
