"""The octavo:: custom ops: schema, kernel choice, fake, autograd; one screen each.

Codes are uint8 in every schema (torch's own checks fail on float8 inputs), a granularity is the two numbers of its
tile, a format its name. The kernel is chosen inside the op, so torch.compile never traces the choice.

Dtypes: a result has the dtype of x (or the one asked for) whatever torch.autocast says; `ops.linear` casts x first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

from octavo.base.errors import UnsupportedError
from octavo.formats.granularity import from_tile
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import SPECS
from octavo.ops.backends import Kernels, Problem, kernels

_RULE = "str spec, int rows, int cols, str method, str scale_format, str backend"
_LINEAR = "Tensor codes, Tensor scale, Tensor? bias, Tensor? input_scale, str spec, int rows, int cols"


@custom_op("octavo::quantize", mutates_args=(), schema=f"(Tensor x, Tensor? scale, {_RULE}) -> (Tensor, Tensor)")
def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    spec: str,
    rows: int,
    cols: int,
    method: str,
    scale_format: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., N, K] -> uint8 codes of the same shape, float32 scale. A given scale comes back as a copy."""
    found = _matrix_kernels("quantize", x, x.dtype, spec, rows, cols, backend)
    q = found.quantize(x, scale, Rule(SPECS[spec], from_tile(rows, cols), method, scale_format))
    return q.codes, q.scale.clone() if scale is not None else q.scale


@quantize.register_fake
def _(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    spec: str,
    rows: int,
    cols: int,
    method: str,
    scale_format: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = from_tile(rows, cols).scale_shape(tuple(x.shape))
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(shape, dtype=torch.float32)


@custom_op(
    "octavo::dequantize",
    mutates_args=(),
    schema="(Tensor codes, Tensor scale, str spec, int rows, int cols, ScalarType dtype, str backend) -> Tensor",
)
def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, spec: str, rows: int, cols: int, dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """uint8 codes and float32 scale -> code * scale in float32, rounded once to `dtype`."""
    q = ScaledTensor(codes, scale, SPECS[spec], from_tile(rows, cols))
    return _matrix_kernels("dequantize", codes, dtype, spec, rows, cols, backend).dequantize(q, dtype)


@dequantize.register_fake
def _(
    codes: torch.Tensor, scale: torch.Tensor, spec: str, rows: int, cols: int, dtype: torch.dtype, backend: str
) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@custom_op("octavo::fake_quantize", mutates_args=(), schema=f"(Tensor x, Tensor? scale, {_RULE}) -> Tensor")
def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    spec: str,
    rows: int,
    cols: int,
    method: str,
    scale_format: str,
    backend: str,
) -> torch.Tensor:
    """dequantize(quantize(x)) in the dtype of x; the gradient passes straight through, saturated values included."""
    there = _matrix_kernels("quantize", x, x.dtype, spec, rows, cols, backend)
    back = _matrix_kernels("dequantize", x, x.dtype, spec, rows, cols, backend)
    rule = Rule(SPECS[spec], from_tile(rows, cols), method, scale_format)
    return back.dequantize(there.quantize(x, scale, rule), x.dtype)


@fake_quantize.register_fake
def _(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    spec: str,
    rows: int,
    cols: int,
    method: str,
    scale_format: str,
    backend: str,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _straight_through(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return grad, *[None] * 7


fake_quantize.register_autograd(_straight_through)


def linear_now(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    spec: str,
    rows: int,
    cols: int,
    activation: str,
    backend: str,
) -> torch.Tensor:
    """x [..., K] times codes [N, K] -> [..., N] in the dtype of x, x quantized first as `activation` says."""
    w = ScaledTensor(codes, scale, SPECS[spec], from_tile(rows, cols))
    x2 = _rows(x)
    with _no_autocast(x):
        found = _linear_kernels("linear", x2, w, activation, backend)
        y = found.linear(x2, w, bias, activation, input_scale)
    return _shaped(y, x, codes.shape[0])


linear = custom_op(
    "octavo::linear",
    linear_now,
    mutates_args=(),
    schema=f"(Tensor x, {_LINEAR}, str activation, str backend) -> Tensor",
)


@linear.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    spec: str,
    rows: int,
    cols: int,
    activation: str,
    backend: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@custom_op(
    "octavo::linear_dx",
    mutates_args=(),
    schema="(Tensor grad, Tensor codes, Tensor scale, str spec, int rows, int cols, str backend) -> Tensor",
)
def linear_dx(
    grad: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, spec: str, rows: int, cols: int, backend: str
) -> torch.Tensor:
    """grad [..., N] times codes [N, K] -> [..., K] in the dtype of grad: the gradient of linear with respect to x."""
    w = ScaledTensor(codes, scale, SPECS[spec], from_tile(rows, cols))
    grad2 = _rows(grad)
    with _no_autocast(grad):
        dx = _linear_kernels("linear_dx", grad2, w, "none", backend).linear_dx(grad2, w)
    return _shaped(dx, grad, codes.shape[1])


@linear_dx.register_fake
def _(
    grad: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, spec: str, rows: int, cols: int, backend: str
) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], codes.shape[1]))


def _refuse_double_backward(ctx: Any, grad: torch.Tensor) -> None:
    raise UnsupportedError(
        "second derivative through octavo::linear",
        need="first derivatives only: the FP8 weight is frozen and the input's rounding passes gradients unchanged",
        fix="Dequantize the layer (FrozenFloat8Linear.dequantize) to differentiate twice.",
    )


linear_dx.register_autograd(_refuse_double_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, codes, scale, bias, _, *ctx.rest = inputs
    ctx.bias_dtype = bias.dtype if bias is not None else None
    ctx.save_for_backward(codes, scale)  # neither x nor a wider copy of the weight


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    codes, scale = ctx.saved_tensors
    spec, rows, cols, _, backend = ctx.rest
    dx = linear_dx(grad, codes, scale, spec, rows, cols, backend) if ctx.needs_input_grad[0] else None
    dbias = None
    if ctx.needs_input_grad[3]:
        dbias = _rows(grad).sum(0).to(ctx.bias_dtype)
    return dx, None, None, dbias, *[None] * 6


linear.register_autograd(_linear_backward, setup_context=_save)


@custom_op(
    "octavo::scaled_mm",
    mutates_args=(),
    schema="(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, str a_spec, int a_rows, int a_cols, "
    "str b_spec, int b_rows, int b_cols, ScalarType out_dtype, str backend) -> Tensor",
)
def scaled_mm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    a_spec: str,
    a_rows: int,
    a_cols: int,
    b_spec: str,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """a [..., M, K] @ b [N, K]^T -> [..., M, N] of `out_dtype`, both quantized."""
    left = ScaledTensor(a, a_scale, SPECS[a_spec], from_tile(a_rows, a_cols))
    right = ScaledTensor(b, b_scale, SPECS[b_spec], from_tile(b_rows, b_cols))
    m, n, k = a.numel() // max(a.shape[-1], 1), b.shape[0], b.shape[1]
    problem = Problem("scaled_mm", a.device.type, out_dtype, b_spec, (b_rows, b_cols), "none", m, n, k)
    with _no_autocast(a):
        return kernels(problem, a.device, backend).scaled_mm(left, right, out_dtype)


@scaled_mm.register_fake
def _(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    a_spec: str,
    a_rows: int,
    a_cols: int,
    b_spec: str,
    b_rows: int,
    b_cols: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [M, K]; reshape(-1, K) would not know M where K is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _shaped(y: torch.Tensor, x: torch.Tensor, last: int) -> torch.Tensor:
    """y [M, last], made here, with the leading extents of x: no view, so that it may be written in place."""
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(y.contiguous(), [*x.shape[:-1], last])
    return result


def _no_autocast(x: torch.Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _matrix_kernels(
    op: str, x: torch.Tensor, dtype: torch.dtype, spec: str, rows: int, cols: int, backend: str
) -> Kernels:
    k = x.shape[-1]
    problem = Problem(op, x.device.type, dtype, spec, (rows, cols), "none", 1, x.numel() // max(k, 1), k)
    return kernels(problem, x.device, backend)


def _linear_kernels(op: str, x: torch.Tensor, w: ScaledTensor, activation: str, backend: str) -> Kernels:
    n, k = w.shape
    tile = w.granularity.tile
    problem = Problem(op, x.device.type, x.dtype, w.spec.name, tile, activation, x.shape[0], n, k)
    return kernels(problem, x.device, backend)
