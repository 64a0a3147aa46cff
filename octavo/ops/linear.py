"""linear: a float input times a frozen quantized weight, differentiable in the input."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from octavo.base.errors import ConfigError, ShapeError, did_you_mean
from octavo.formats.recipe import ACTIVATIONS
from octavo.formats.scaled import ScaledTensor
from octavo.ops import library


def linear(
    x: torch.Tensor,
    q: ScaledTensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "none",
    input_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """x [..., K] @ dequantize(q) [N, K]^T + bias [N] -> [..., N].

    activation: what happens to x first, as an FP8 engine would: `none`, `static` (one given float32 input_scale),
    `token` (absmax / 448 of each row), `group128` (of each 128 values of a row).
    Result: the dtype of x; inside torch.autocast, autocast's dtype, as for torch's own linear.
    Gradients: to x (dY @ W; rounding and saturation of x pass it on unchanged) and to bias; never to q. Neither x nor
    a wider copy of the weight is kept for backward. A second derivative is an UnsupportedError.
    ShapeError, ConfigError: shapes or settings that do not fit. UnsupportedError: a named backend that cannot.
    """
    check_activation(activation)
    if (activation == "static") != (input_scale is not None):
        got = "no input_scale" if input_scale is None else "an input_scale"
        raise ConfigError(f"linear, activation '{activation}'", got=got, need="input_scale for 'static' and only then")
    if q.codes.dim() != 2 or not x.dim() or x.shape[-1] != q.shape[1]:
        raise ShapeError("linear", got=f"x {list(x.shape)}, weight {list(q.shape)}", need="x [..., K], weight [N, K]")
    if not x.is_floating_point():
        raise ShapeError("linear", got=f"x of {x.dtype}", need="float values")
    return apply(x, q.codes, q.scale, bias, input_scale, q.spec.name, q.granularity.tile, activation, backend)


def check_activation(activation: str) -> None:
    """A ConfigError that names the nearest mode."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation mode '{activation}' is unknown", fix=did_you_mean(activation, ACTIVATIONS))


def apply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    spec: str,
    tile: tuple[int, int],
    activation: str,
    backend: str,
) -> torch.Tensor:
    """`linear` on its parts, unchecked: what a module that checked once calls."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = x.to(torch.get_autocast_dtype(kind))
    function = library.linear_now if nobody_watches(x) else library.linear
    result: torch.Tensor = function(x, codes, scale, bias, input_scale, spec, *tile, activation, backend)
    return result


def nobody_watches(x: torch.Tensor) -> bool:
    """Whether neither autograd, a compiler nor a mode of torch has to see an op, whose dispatch takes longer than its
    kernel where few tokens are multiplied."""
    watched = torch.is_grad_enabled() or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return type(x) is torch.Tensor and x.device.type != "meta" and not watched
