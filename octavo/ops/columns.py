"""The column loop of compensated rounding, see formats.rounding.Columns, as a CUDA kernel. CPUs: ops.stacked.

In eager torch a matrix with 14,336 inputs takes some 400,000 launches; the kernel is two for every 128 columns.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from octavo.base.log import logger
from octavo.base.packages import pip_line, version_of
from octavo.formats.rounding import Columns, EagerColumns
from octavo.formats.spec import FloatSpec
from octavo.kernels.cuda import loader

ROWS = 8  # of a block of threads, one warp each


def columns_for(device: torch.device) -> Columns:
    """What runs the column loop of one matrix on this device: the kernel on CUDA, torch elsewhere."""
    if device.type != "cuda":
        return EagerColumns()
    if version_of("cuda-core") is None:
        _say_slow()
        return EagerColumns()
    return KernelColumns()


class KernelColumns(EagerColumns):
    """round_columns.cu, float32 on one CUDA device."""

    def compensate(
        self, weight: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, spec: FloatSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _launch(weight, scale, factor, weight.new_empty(weight.shape), spec, compensate=True)

    def descend(
        self, gradient: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, h: torch.Tensor, spec: FloatSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _launch(gradient, scale, h, y.clone(memory_format=torch.contiguous_format), spec, compensate=False)


def _launch(
    value: torch.Tensor,
    scale: torch.Tensor,
    matrix: torch.Tensor,
    code: torch.Tensor,
    spec: FloatSpec,
    compensate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, b = value.shape
    out = value.new_empty(n, b)
    if not n:
        return code, out
    grid = {"MANTISSA": spec.mantissa, "MAX": int(spec.max), "FINEST": spec.bias - 1 + spec.mantissa}
    variant = loader.Variant("round_columns.cu", (("COMPENSATE", int(compensate)), *grid.items()))
    rows = [x if x.stride(1) == 1 else x.contiguous() for x in (value, scale, matrix, code)]
    operands = [(x, np.int64(x.stride(0))) for x in rows]
    arguments = [part for operand in operands for part in operand]
    loader.launch(variant, (-(-n // ROWS),), 32 * ROWS, (*arguments, out, np.int32(n), np.int32(b)), value)
    return code, out


@cache
def _say_slow() -> None:
    logger().warning(
        "the column loop of compensated rounding runs in eager torch, some hundred times slower than its kernel: %s",
        pip_line("gpu"),
    )
