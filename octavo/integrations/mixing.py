"""A model in 16 bit and the same in FP8, side by side: any layer of one can stand in for the other's.

What a policy costs is then measured without loading anything again: the 16-bit model runs, with the FP8 layers that the
policy leaves FP8 in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from octavo.base.log import progress
from octavo.formats.recipe import Recipe
from octavo.integrations import measuring
from octavo.integrations.scoring import Logits, score, swapped
from octavo.modules.attribution import Attribution
from octavo.modules.divergence import Divergence
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.store.moments import Moments
from octavo.store.policy import unit_of
from octavo.store.tensors import Checkpoint
from octavo.store.units import HIGH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shares = dict[str, dict[str, float]]
SEED = 0  # of the draws from the models' own distributions


@dataclass(frozen=True)
class Mixture:
    """model: in 16 bit. own: its layers by name. twins: option -> the same name -> FP8 layer. units: name -> unit."""

    model: PreTrainedModel
    own: Mapping[str, nn.Module]
    twins: Mapping[str, Mapping[str, nn.Module]]
    units: Mapping[str, str]

    @classmethod
    def open(
        cls,
        opened: measuring.Opened,
        recipes: Mapping[str, Recipe],
        *,
        activation: str,
        moments: Moments | None = None,
        device: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Mixture:
        """opened: the model in 16 bit. recipes: option -> how its FP8 layers are made."""
        settings: dict[str, Any] = {"activation": activation, "moments": moments, "device": device, "dtype": dtype}
        twins: dict[str, dict[str, nn.Module]] = {}
        for option, recipe in recipes.items():
            model = measuring.open_model(opened.folder, recipe=recipe, **settings).model
            twins[option] = {
                name: module
                for name, module in model.named_modules()
                if isinstance(module, FrozenFloat8Linear | FrozenFloat8Experts)
            }
        stored = measuring.stored_names(opened.model, Checkpoint.open(opened.folder))
        names = {name for layers in twins.values() for name in layers}
        own = {name: opened.model.get_submodule(name) for name in names}
        units = {name: _unit(module, name, stored) for name, module in own.items()}
        for parameter in opened.model.parameters():
            parameter.requires_grad_(False)
        return cls(opened.model, own, twins, units)

    def measure(self, windows: torch.Tensor, policies: Sequence[Mapping[str, str]], title: str) -> list[Divergence]:
        """Divergence from the 16-bit model of each policy, over windows of tokens, int64 [n, T].

        A policy: unit -> option or HIGH; units that it does not name stay in 16 bit.
        """
        candidates = {str(i): self._logits(picks) for i, picks in enumerate(policies)}
        return list(score(partial(measuring.logits, self.model), candidates, windows, title).values())

    def _logits(self, picks: Mapping[str, str]) -> Logits:
        found = ((name, self.twins.get(picks.get(unit, HIGH), {}).get(name)) for name, unit in self.units.items())
        new = {name: twin for name, twin in found if twin is not None}

        def run(window: torch.Tensor) -> torch.Tensor:
            with swapped(self.model, new, self.own):
                return measuring.logits(self.model, window)

        return run

    def attribute(self, windows: torch.Tensor, few: int) -> tuple[Shares, Shares]:
        """option -> unit -> estimated KL, nats per token, of the unit alone, from one backward pass a window.

        Over all windows, and over the first `few`, to compare with what is measured there.
        """
        generator = torch.Generator().manual_seed(SEED)
        device = next(self.model.parameters()).device
        embeddings = cast(Any, self.model).get_input_embeddings()
        wake = embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
        try:
            with (
                torch.enable_grad(),
                Attribution(self.model, self.twins, self.units) as seen,
                progress("Single layers", len(windows)) as advance,
            ):
                for number, window in enumerate(windows, 1):
                    result = self.model(input_ids=window[None].to(device), use_cache=False)
                    seen.backward(result.logits[0], generator)
                    if number <= few:
                        first = seen.result()
                    advance(1)
        finally:
            wake.remove()
        return seen.result(), first


def _unit(module: nn.Module, name: str, stored: measuring.StoredNames) -> str:
    leaf = "weight" if isinstance(module, nn.Linear) else "down_proj"
    parts = stored(f"{name}.{leaf}")
    return unit_of(parts[0][0] if parts else name)
