"""What stays on a loaded model so that it trains fused with anybody's PEFT, TRL or loop: one hook on its decoder.

Names, parameters, state_dict and inference are what they are without it. PEFT is not needed before there are adapters.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn

from octavo.base.hardware import HardwareCaps
from octavo.base.log import logger
from octavo.base.packages import version_of
from octavo.integrations.layers import decoder


class FuseInTraining:
    """A forward pre-hook of a decoder: before a step that trains its layers are bound to the fused path (`fused`).

    Anew where PEFT has exchanged modules since; what is bound asks itself at each call whether it can be fused. On the
    decoder and not on its layers, since checkpointing runs these again and must find what ran the first time.
    """

    said = ""

    def __call__(self, layers: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or "peft" not in sys.modules:
            return
        from octavo.integrations.fused import fuse

        if not (layers.training or _adapters_train(layers)):
            return
        if fuse(layers) or not self.said:
            self._say(layers)

    def _say(self, layers: nn.Module) -> None:
        """Once for each state of things: a warning where FP8 products could run and do not."""
        from octavo.integrations.survey import survey

        found = survey(layers)
        if self.said != str(found):
            self.said = str(found)
            missed = found.reason and any(parameter.is_cuda for parameter in layers.parameters())
            logger().log(logging.WARNING if missed else logging.INFO, "%s", found)

    def explain(self, module: nn.Module, gpu: HardwareCaps | None) -> str:
        """Which path a step of training takes and why, here or on that GPU: for octavo.explain."""
        if version_of("peft") is None:
            return "training: PEFT is not installed"
        from octavo.integrations.survey import survey

        return str(survey(module, gpu))


def _adapters_train(layers: nn.Module) -> bool:
    """In evaluation mode, which a loop of one's own may not have left."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters = (module for module in layers.modules() if isinstance(module, BaseTunerLayer))
    return any(parameter.requires_grad for adapter in adapters for parameter in adapter.parameters())


def fuse_in_training(model: nn.Module) -> None:
    """Leave the hook on the decoder of a Transformers model, with adapters or without; on others nothing."""
    if not hasattr(model, "get_decoder"):
        return
    layers = decoder(model)
    if not any(isinstance(hook, FuseInTraining) for hook in layers._forward_pre_hooks.values()):
        layers.register_forward_pre_hook(FuseInTraining())
