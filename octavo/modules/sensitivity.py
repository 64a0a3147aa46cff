"""What FP8 does to one linear: error of its weights under each scheme, and of its outputs on inputs it really gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.measure import sqnr_db
from octavo.formats.rule import Rule
from octavo.formats.scale import scale_of
from octavo.formats.spec import E4M3
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.quantize import fake_quantize

SCHEMES: Mapping[str, Rule] = {
    "channel": Rule(granularity=PerRow()),
    "block128": Rule(granularity=PerBlock(128, 128)),
    "tensor": Rule(granularity=PerTensor()),
    "po2": Rule(granularity=PerRow(), scale_format="po2"),
}
ACTIVATION_RULES: Mapping[str, Rule] = {
    "static": Rule(granularity=PerTensor()),
    "token": Rule(granularity=PerRow()),
    "group128": Rule(granularity=PerGroup(128)),
}


def float_weight(linear: nn.Module) -> torch.Tensor:
    """The weight of a linear, float32 [N, K]; codes of an FP8 one are decoded."""
    if isinstance(linear, FrozenFloat8Linear):
        return linear.dequantize(torch.float32)
    return linear.get_parameter("weight").detach().float()


def weight_errors(weights: Sequence[torch.Tensor]) -> list[dict[str, float]]:
    """Weights that engines fuse into one matrix, float32 [N, K] each -> for each, scheme -> SQNR in dB.

    With one scale per tensor, fused weights share the largest; every other scheme scales each on its own.
    """
    common = scale_of(torch.stack([PerTensor().amax(w) for w in weights]).amax(), E4M3)
    scales = {"tensor": common}
    return [
        {name: sqnr_db(fake_quantize(w, rule, scale=scales.get(name)), w) for name, rule in SCHEMES.items()}
        for w in weights
    ]


def output_error(
    inputs: torch.Tensor, weight: torch.Tensor, scheme: str, activation: str, input_scale: float | None = None
) -> float:
    """SQNR in dB of x W^T when both are quantized to E4M3, against float32. inputs [r, K], weight [N, K].

    scheme: a key of SCHEMES. activation: `none` (inputs stay), `token`, `group128`, or `static` with its input_scale.
    """
    x, w = inputs.float(), weight.float()
    xq = x
    if activation != "none":
        scale = None if input_scale is None else torch.tensor(input_scale, dtype=torch.float32, device=x.device)
        xq = fake_quantize(x, ACTIVATION_RULES[activation], scale=scale)
    return sqnr_db(xq @ fake_quantize(w, SCHEMES[scheme]).T, x @ w.T)
