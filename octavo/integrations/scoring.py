"""Several candidates against one reference on the same windows of tokens; no logits are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from octavo.base.errors import ConfigError
from octavo.base.log import progress
from octavo.formats.architectures import layer_index
from octavo.integrations.measuring import logits
from octavo.modules.divergence import Divergence, PairedScore
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear

Logits = Callable[[torch.Tensor], torch.Tensor]


def score(
    reference: Logits, candidates: Mapping[str, Logits], windows: torch.Tensor, title: str
) -> dict[str, Divergence]:
    """Name -> how far that candidate is from the reference. windows: tokens, int64 [n, T]. title: of the bar."""
    scores = {name: PairedScore() for name in candidates}
    with progress(title, len(windows) * len(candidates)) as advance:
        for window in windows:
            theirs = reference(window)
            for name, candidate in candidates.items():
                scores[name].add(theirs, candidate(window).to(theirs.device), window)
                advance(1)
    return {name: found.result() for name, found in scores.items()}


def spread(windows: torch.Tensor, tokens: int) -> torch.Tensor:
    """At most so many tokens in whole windows, at least one window, spread evenly over all of them."""
    count = min(len(windows), max(1, tokens // windows.shape[1]))
    return windows[[i * len(windows) // count for i in range(count)]]


def attribution(reference: nn.Module, model: nn.Module, windows: torch.Tensor) -> dict[str, Divergence]:
    """What each part of an FP8 `model` costs on its own: put into `reference`, which is otherwise as it was.

    Parts: `layer 7`, all FP8 modules of a layer, and `*.up_proj`, all FP8 modules of that name. ConfigError if the two
    models do not call their modules by the same names, or nothing of `model` is FP8.
    """
    modules = {n: m for n, m in model.named_modules() if isinstance(m, FrozenFloat8Linear | FrozenFloat8Experts)}
    own = dict(reference.named_modules())
    if not modules or not modules.keys() <= own.keys():
        got = "a model without FP8 linears" if not modules else "a reference of another architecture"
        raise ConfigError("attribution", got=got, need="the FP8 form of the reference", fix="Leave --attribution out.")
    parts: dict[str, list[str]] = {}
    for name in modules:
        index = layer_index(name)
        if index is not None:
            parts.setdefault(f"layer {index}", []).append(name)
    for name in modules:
        parts.setdefault(f"*.{name.rpartition('.')[2]}", []).append(name)

    def with_part(names: list[str]) -> Logits:
        def run(window: torch.Tensor) -> torch.Tensor:
            with swapped(reference, {name: modules[name] for name in names}, own):
                return logits(reference, window)

        return run

    candidates = {part: with_part(names) for part, names in parts.items()}
    return score(lambda window: logits(reference, window), candidates, windows, "Attributing to layers")


@contextmanager
def swapped(model: nn.Module, new: Mapping[str, nn.Module], own: Mapping[str, nn.Module]) -> Iterator[None]:
    """While the block lasts, `new` modules in place of the model's `own`, by name."""
    for name, module in new.items():
        model.set_submodule(name, module)
    try:
        yield
    finally:
        for name in new:
            model.set_submodule(name, own[name])
