"""The column loop of compensated rounding, see formats.rounding.Columns: a CUDA kernel, and few operations on a CPU.

In eager torch a matrix with 14,336 inputs takes some 400,000 launches; the kernel is two for every 128 columns.
"""

from __future__ import annotations

from functools import cache
from threading import Lock

import numpy as np
import torch

from octavo.base.log import logger
from octavo.base.packages import pip_line, version_of
from octavo.formats.codec import nearest_
from octavo.formats.rounding import Columns, EagerColumns
from octavo.formats.spec import FloatSpec
from octavo.kernels.cuda import loader
from octavo.ops.cpu import encode_into

ROWS = 8  # of a block of threads, one warp each


def columns_for(device: torch.device) -> Columns:
    """What runs the column loop of one matrix on this device: the kernel on CUDA, torch elsewhere."""
    if device.type == "cpu":
        return PanelColumns()
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


# Small operations one after another: in two threads at once each would wait for the interpreter at every one of them.
_ONE_LOOP = Lock()


class PanelColumns:
    """float32 on a CPU: half the time of EagerColumns, whose codes it has, but where a float32 sum differs in a bit.

    What a column's predecessors change in it is added when its turn comes, as one product with all their errors,
    instead of each changing all columns that follow.
    """

    def __init__(self) -> None:
        self._panel: _Panel | None = None

    def compensate(
        self, weight: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, spec: FloatSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        panel = self._panel_for(weight, scale)
        before = factor.mT.neg().unbind()
        with _ONE_LOOP:
            for j, (v, s, y, error) in enumerate(
                zip(panel.values, panel.scales, panel.codes, panel.results, strict=True)
            ):
                v.addmv_(panel.earlier[j], before[j].narrow(0, 0, j))
                nearest_(torch.div(v, s, out=y), spec, panel.scratch)
                torch.sub(v, torch.mul(y, s, out=error), out=error)
        return panel.code.mT, panel.result.mT

    def descend(
        self, gradient: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, h: torch.Tensor, spec: FloatSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        panel = self._panel_for(gradient, scale)
        panel.code.copy_(y.mT)
        panel.result.zero_()
        before = h.neg().unbind()
        with _ONE_LOOP:
            for j, diagonal in enumerate(h.diagonal().tolist()):
                v, s, code, moved = panel.values[j], panel.scales[j], panel.codes[j], panel.results[j]
                if not diagonal > 0:
                    v.copy_(code)
                    continue
                v.addmv_(panel.earlier[j], before[j].narrow(0, 0, j))
                better = nearest_(torch.addcdiv(code, v, s, value=1 / diagonal, out=v), spec, panel.scratch)
                torch.sub(better, code, out=moved).mul_(s)
        return panel.value.mT, panel.result.mT

    def encode(self, y: torch.Tensor, spec: FloatSpec) -> torch.Tensor:
        codes = torch.empty(y.shape, dtype=torch.uint8, device=y.device)
        encode_into(y, codes, spec)
        return codes

    def _panel_for(self, value: torch.Tensor, scale: torch.Tensor) -> _Panel:
        shape = value.mT.shape
        if self._panel is None or self._panel.value.shape != shape:
            self._panel = _Panel(*shape)
        self._panel.value.copy_(value.mT)
        self._panel.scale.copy_(scale.mT)
        return self._panel


class _Panel:
    """Memory for b columns of n rows, each a row here, and views of it: making those anew would cost as much as using
    them. earlier[j]: the results of the columns before j, [n, j].
    """

    def __init__(self, b: int, n: int) -> None:
        self.value, self.scale, self.code, self.result = torch.empty(4, b, n, device="cpu").unbind()
        self.values, self.scales = self.value.unbind(), self.scale.unbind()
        self.codes, self.results = self.code.unbind(), self.result.unbind()
        self.earlier = [self.result[:j].mT for j in range(b)]
        self.scratch = torch.empty(n, device="cpu")


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
