"""What each layer's error adds to the divergence of a whole model, all layers at once, from backward passes.

To second order, KL(p || q) of the next-token distributions is half the square of the logits' change in the Fisher
metric of p. A layer alone changes its output at token t by d_t, the logits by the Jacobian times d. With v drawn from
the Fisher metric of the logits (mean 0, covariance diag(p) - p p^T) and g = Jacobian^T v, one backward pass gives the
square: E (sum_t g_t d_t)^2 / 2 is the KL over the tokens of a sample. Products of different tokens are left out: their
mean is small against their noise, which a few samples would not average away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn


def fisher_draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """logits [T, V] -> v [T, V], float32, normal with mean 0 and covariance diag(p) - p p^T in every row."""
    p = logits.detach().float().softmax(-1)
    noise = torch.randn(p.shape, generator=generator).to(p.device) * p.sqrt()
    return noise - p * noise.sum(-1, keepdim=True)


class Attribution:
    """Gathers, while samples run forward and backward, the KL that every unit alone would cause.

    twins: option -> module name -> what stands in the module's place, called with the same inputs. units: module name
    -> the unit whose errors are added before they are squared. Use as a context manager; one sample at a time.
    """

    def __init__(
        self, model: nn.Module, twins: Mapping[str, Mapping[str, nn.Module]], units: Mapping[str, str]
    ) -> None:
        self._model, self._twins, self._units = model, twins, units
        self._sums: dict[tuple[str, str], float] = {}
        self._sample: dict[tuple[str, str], torch.Tensor] = {}
        self._tokens = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for name in {name for twins in self._twins.values() for name in twins}:
            module = self._model.get_submodule(name)
            self._hooks.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, name: str) -> Callable[..., None]:
        unit = self._units[name]

        def forward(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> None:
            with torch.no_grad():
                changes = {
                    option: (twins[name](*inputs, **named) - output).float()
                    for option, twins in self._twins.items()
                    if name in twins
                }

            def backward(gradient: torch.Tensor) -> None:
                for option, change in changes.items():
                    share = (gradient.float() * change).sum(-1).reshape(-1)
                    key = (option, unit)
                    self._sample[key] = self._sample[key] + share if key in self._sample else share

            output.register_hook(backward)  # type: ignore[no-untyped-call]

        return forward

    def backward(self, logits: torch.Tensor, generator: torch.Generator) -> None:
        """One sample ran forward: logits [T, V]. Backpropagate a draw and take in what the hooks saw."""
        logits.backward(fisher_draw(logits, generator).to(logits.dtype))  # type: ignore[no-untyped-call]
        for key, share in self._sample.items():
            self._sums[key] = self._sums.get(key, 0.0) + 0.5 * float(share.double().square().sum())
        self._sample.clear()
        self._tokens += len(logits)

    def result(self) -> dict[str, dict[str, float]]:
        """option -> unit -> KL, nats per token, when the unit alone takes the option."""
        found: dict[str, dict[str, float]] = {option: {} for option in self._twins}
        for (option, unit), total in self._sums.items():
            found[option][unit] = total / self._tokens
        return found
