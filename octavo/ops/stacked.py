"""Compensated rounding on a CPU: formats.rounding.compensated for several matrices of one shape at a time.

The codes are the oracle's, but where a float32 sum differs in its last bit. Its column loop is a dozen small operations
a column, whose dispatch takes longer than their work. So matrices stand side by side, each operation works on one
column of all of them, and what a column changes in later ones is taken from INNER columns by elements, from the rest by
products. Everything is in units of the codes where a row has one scale. Layout: [K, L, N], K inputs in the order of
each one's curvature, L matrices, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import torch

from octavo.formats.codec import nearest_
from octavo.formats.rounding import BLOCK, Curvature, Rounded
from octavo.formats.spec import FloatSpec
from octavo.ops.cpu import encode_into

INNER = 16
# From this share of nearest rounding's error on, or where that is so small a share of what it would be without
# correlations, a row's errors are measured in float32.
CLOSE, CANCELLED = 0.9, 1 / 12
CACHED = 1 << 17  # values of a part of a stack that several operations in a row take
# Small operations one after another: in two threads at once each would wait for the interpreter at every one of them.
_ONE_LOOP = Lock()


@dataclass(frozen=True)
class Matrix:
    """weight: finite [N, K] of any float dtype. scale: float32 [N, 1] or [N, K]."""

    weight: torch.Tensor
    scale: torch.Tensor
    curvature: Curvature


def compensated_stack(matrices: Sequence[Matrix], spec: FloatSpec) -> list[Rounded]:
    """Matrices of one shape, with scales of one shape -> what formats.rounding.compensated makes of each."""
    stack = _Stack(matrices, spec)
    y, error = stack.descend(stack.compensate())
    error_nearest = stack.quadratic(None, [matrix.curvature.moments for matrix in matrices])
    stack.settle(y, error, error_nearest)
    error = torch.minimum(error, error_nearest)
    codes = torch.empty(y.shape, dtype=torch.uint8)
    encode_into(y, codes, spec)
    result = []
    for i, matrix in enumerate(matrices):
        own = torch.empty(codes[:, i].shape, dtype=torch.uint8).index_copy_(0, matrix.curvature.order, codes[:, i])
        square = matrix.scale[:, 0].square() if stack.units is None else 1.0
        result.append(Rounded(own.mT.contiguous(), error[i] * square, error_nearest[i] * square))
    return result


class _Stack:
    """target: weights over their scales. units: scales, None where a row has one. value, e: memory for the passes."""

    def __init__(self, matrices: Sequence[Matrix], spec: FloatSpec) -> None:
        n, k = matrices[0].weight.shape
        self.spec, self.curvatures = spec, [matrix.curvature for matrix in matrices]
        self.target = torch.empty(k, len(matrices), n)
        self.value, self.e = torch.empty_like(self.target), torch.empty_like(self.target)
        self.units = torch.empty_like(self.target) if matrices[0].scale.shape[1] > 1 else None
        for i, matrix in enumerate(matrices):
            order, scale = matrix.curvature.order, matrix.scale.mT
            scale = scale if self.units is None else scale.index_select(0, order)
            torch.div(matrix.weight.mT.contiguous().index_select(0, order), scale, out=self.target[:, i])
            if self.units is not None:
                self.units[:, i] = scale
        rows = max(CACHED // (len(matrices) * n), 1)
        self.parts = [slice(start, start + rows) for start in range(0, k, rows)]

    def compensate(self) -> torch.Tensor:
        """One pass over the columns, left to right: decoded codes."""
        spec, units = self.spec, self.units
        if units is None:
            self.value.copy_(self.target)
        else:
            torch.mul(self.target, units, out=self.value)
        y = torch.empty_like(self.target)
        values, codes = self.value.unbind(), y.unbind()
        scratch = torch.empty_like(codes[0])

        def step(j: int, error: torch.Tensor) -> None:
            v, code = values[j], codes[j]
            if units is None:
                torch.sub(v, nearest_(code, spec, scratch, of=v), out=error)
            else:
                nearest_(torch.div(v, units[j], out=code), spec, scratch)
                torch.sub(v, torch.mul(code, units[j], out=error), out=error)

        _sweep(self.value, [curvature.factor for curvature in self.curvatures], step)
        return y

    def descend(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each column moves to the code nearest its optimum, the others fixed: decoded codes, and e H e^T, [L, N].

        On the damped H. From an error e whose gradient is g = H e, moving column j by m changes e H e^T by
        m (m H_jj - 2 g_j): that spares the product that would measure it.
        """
        spec, units, damped = self.spec, self.units, [_damped(curvature) for curvature in self.curvatures]
        error = self.quadratic(y, damped)
        diagonal = torch.stack([h.diagonal() for h in damped], 1)[:, :, None]
        inverse = torch.where(diagonal > 0, 1 / diagonal, 0.0)  # dead inputs stay
        step_size = inverse if units is None else torch.div(inverse, units, out=self.e)
        better = torch.empty_like(y)
        gradients, codes, results = self.value.unbind(), y.unbind(), better.unbind()
        scratch = torch.empty_like(codes[0])

        def step(j: int, moved: torch.Tensor) -> None:
            nearest_(torch.addcmul(codes[j], gradients[j], step_size[j], out=results[j]), spec, scratch)
            torch.sub(results[j], codes[j], out=moved)
            if units is not None:
                moved.mul_(units[j])

        _sweep(self.value, damped, step)
        ridges = torch.stack([curvature.live * curvature.ridge for curvature in self.curvatures], 1)[:, :, None]
        for part in self.parts:
            moved = self._real(better[part] - y[part], part)
            error += (moved * diagonal[part]).sub_(self.value[part], alpha=2).mul_(moved).sum(0)
            rest = self._real(self.target[part] - better[part], part)
            error -= rest.square_().mul_(ridges[part]).sum(0)
        return better, error.clamp_(min=0)

    def quadratic(self, y: torch.Tensor | None, moments: Sequence[torch.Tensor]) -> torch.Tensor:
        """e H e^T of these codes, or of the nearest ones for None, [L, N]. Leaves e in `e` and H e in `value`."""
        for part in self.parts:
            codes = y[part] if y is not None else nearest_(self.target[part].clone(), self.spec)
            torch.sub(self.target[part], codes, out=self.e[part])
            self._real(self.e[part], part)
        fast = y is None and torch.cpu._is_amx_tile_supported()
        for i, h in enumerate(moments):
            if fast:  # five times as fast; three digits do for what `settle` looks at again
                self.value[:, i] = h.bfloat16() @ self.e[:, i].bfloat16()
            else:
                self.value[:, i].addmm_(h, self.e[:, i], beta=0)
        total = torch.zeros_like(self.e[0])
        for part in self.parts:
            total += (self.e[part] * self.value[part]).sum(0)
        return total.clamp_(min=0)

    def settle(self, y: torch.Tensor, error: torch.Tensor, error_nearest: torch.Tensor) -> None:
        """Where nearest rounding is not clearly worse: both errors again, in float32, and its codes in rows where its
        error is lower."""
        close = (error > CLOSE * error_nearest) | (error_nearest < CANCELLED * self._spread())
        for i in range(close.shape[0]):
            rows = close[i].nonzero()[:, 0]
            if not len(rows):
                continue
            target, h = self.target[:, i, rows], self.curvatures[i].moments
            ours, plain = y[:, i, rows], nearest_(target.clone(), self.spec)
            for codes, found in ((ours, error), (plain, error_nearest)):
                e = target - codes if self.units is None else (target - codes) * self.units[:, i, rows]
                found[i, rows] = ((h @ e) * e).sum(0).clamp_(min=0)
            worse = error[i, rows] > error_nearest[i, rows]
            y[:, i, rows[worse]] = plain[:, worse]

    def _spread(self) -> torch.Tensor:
        """Sum of e_j^2 H_jj over the columns of `e`, [L, N]. Of it, by Cauchy and Schwarz, 1/128 is four standard
        deviations of what rounding e and H to BF16 changes in e H e^T."""
        diagonal = torch.stack([curvature.moments.diagonal() for curvature in self.curvatures], 1)[:, :, None]
        total = torch.zeros_like(self.e[0])
        for part in self.parts:
            total += self.e[part].square().mul_(diagonal[part]).sum(0)
        return total

    def _real(self, x: torch.Tensor, part: slice) -> torch.Tensor:
        """x, in units of the codes, times these, in place."""
        return x if self.units is None else x.mul_(self.units[part])


def _damped(curvature: Curvature) -> torch.Tensor:
    h = curvature.moments.clone()
    h.diagonal().add_(curvature.live * curvature.ridge)
    return h


def _sweep(value: torch.Tensor, matrices: Sequence[torch.Tensor], step: Callable[[int, torch.Tensor], None]) -> None:
    """step(j, result) for each column j of value, once all that the columns before it change in it has been
    subtracted: the matrix's element [i, j] times the result of column i. It writes the result, [L, N]."""
    k, count, n = value.shape
    result = value.new_empty(min(BLOCK, k), count, n)
    results = result.unbind()
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        block = value[start:stop]
        local = [matrix[start:stop, start:stop] for matrix in matrices]
        factors = torch.stack(local, 2)[..., None].neg_()
        with _ONE_LOOP:
            for first in range(0, stop - start, INNER):
                last = min(first + INNER, stop - start)
                _subtract(block[first:last], [matrix[:first, first:last] for matrix in local], result[:first])
                for j in range(first, last):
                    step(start + j, results[j])
                    if j + 1 < last:
                        block[j + 1 : last].addcmul_(factors[j, j + 1 : last], results[j])
        _subtract(value[stop:], [matrix[start:stop, stop:] for matrix in matrices], result[: stop - start])


def _subtract(value: torch.Tensor, matrices: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    if len(value) and len(result):
        for i, matrix in enumerate(matrices):
            value[:, i].addmm_(matrix.mT, result[:, i], alpha=-1)
