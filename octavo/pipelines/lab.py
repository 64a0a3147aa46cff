"""The models that tune measures with: opened once, in 16 bit and in FP8, and the text they are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.base.errors import DataError
from octavo.base.log import logger
from octavo.formats.recipe import Recipe
from octavo.integrations import measuring
from octavo.integrations.data import load_data, token_windows
from octavo.integrations.mixing import Mixture
from octavo.pipelines.phases import Facts
from octavo.pipelines.targets import Picks
from octavo.store.moments import Moments
from octavo.store.tensors import Checkpoint
from octavo.store.units import Unit, mixed_recipe

if TYPE_CHECKING:
    from octavo.pipelines.tune_report import TuneConfig

FEW = 4  # layers alone are measured on every FEW-th part of the windows


class Lab:
    """The models in memory, opened once."""

    def __init__(
        self, config: TuneConfig, source: Checkpoint, units: list[Unit], base: Recipe, moments: Path | None
    ) -> None:
        dtype = measuring.compute_dtype(config.dtype, config.device)
        opened = measuring.open_model(source.folder, device=config.device, dtype=dtype)
        self.windows = measuring_windows(config, opened)
        self.few = -(-len(self.windows) // FEW)
        schemes = dict.fromkeys(option for unit in units for option in unit.rules)
        recipes = {}
        for scheme in schemes:
            has = {unit.name: scheme if scheme in unit.rules else base.name for unit in units}
            recipes[scheme] = mixed_recipe(base, units, has)
        loaded = Moments.open(moments, model=source) if moments else None
        self.mixture = Mixture.open(
            opened, recipes, activation=config.activation, moments=loaded, device=config.device, dtype=dtype
        )

    def attribute(self) -> Facts:
        every, few = self.mixture.attribute(self.windows, self.few)
        return {"every": every, "few": few}

    def alone(self, all_fp8: Picks, names: list[str]) -> Facts:
        """All in FP8 on all windows, and each of these units alone on a few."""
        found = self.mixture.measure(self.windows[: self.few], [{n: all_fp8[n]} for n in names], "Layers alone")
        alone = {name: result.kl.mean for name, result in zip(names, found, strict=True)}
        return {**self.joint(all_fp8), "alone": alone}

    def joint(self, picks: Picks) -> Facts:
        return self._facts(self.mixture.measure(self.windows, [picks], "Measuring")[0])

    def _facts(self, result: Any) -> Facts:
        se = result.kl.se if len(self.windows) > 1 else None
        return {"kl": result.kl.mean, "se": se, "top1": result.top1.mean, "tokens": self.windows.numel()}


def measuring_windows(config: TuneConfig, opened: measuring.Opened) -> torch.Tensor:
    """Text that calibration does not see: the demo's training topics, else what follows the calibration's samples."""
    tokenizer, context = opened.tokenizer, opened.context(min(config.context, config.tokens))
    demo = config.data == "demo"
    data = load_data(config.data, "train" if demo else "calibration")
    texts, count = data.texts(tokenizer), config.tokens // context
    skip = 0 if demo or config.rounding == "nearest" else config.samples
    if data.kind != "text":
        texts, skip = texts[skip:], 0
    windows = token_windows(tokenizer, texts, context, skip + count)[skip:] if texts else torch.empty(0, context)
    if not len(windows):
        fix = "Give more text, or fewer --samples."
        raise DataError(f"data '{config.data}': no text is left to measure on", need=f"{context} tokens more", fix=fix)
    opened.require_known(windows)
    if len(windows) < count:
        logger().warning("%s holds %d windows to measure on, %d were asked for", config.data, len(windows), count)
    return windows
