"""Quantizing a layer's weight for a conversion: nearest, or with the second moments of its inputs at hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import Protocol

import torch

from octavo.base.errors import DataError
from octavo.formats.codec import all_finite
from octavo.formats.rounding import Curvature, Rounded, compensated
from octavo.formats.rule import Rule
from octavo.formats.scale import mse_scale
from octavo.formats.scaled import ScaledTensor
from octavo.ops.backends import Problem, kernels
from octavo.ops.columns import columns_for
from octavo.ops.quantize import quantize
from octavo.ops.stacked import Matrix, compensated_stack

# Values of a slice of rows: the columns are a loop, so that more rows at a time cost less each.
SLICE = 1 << 26
KEPT = 2  # factorizations, of three K x K matrices each
Job = tuple[torch.Tensor, Rule, torch.Tensor | None, str]  # x, rule, scale, module


def round_nearest(x: torch.Tensor, rule: Rule, scale: torch.Tensor | None, module: str) -> ScaledTensor:
    """`octavo.quantize` in the form that conversions call.

    Without the custom op: its first call imports torch's compiler, 1.6 s that a short conversion would notice.
    """
    rows, cols = x.shape
    problem = Problem("quantize", x.device.type, x.dtype, rule.spec.name, rule.granularity.tile, "none", 1, rows, cols)
    return kernels(problem, x.device, "auto").quantize(x, scale, rule)


class MomentSource(Protocol):
    """What keeps second moments by module, such as octavo.store.moments.Moments."""

    def __contains__(self, module: object) -> bool: ...

    def key(self, module: str) -> str: ...

    def get(self, module: str) -> torch.Tensor: ...


class Compensator:
    """quantize(x, rule, scale, module): error-compensated where the rule says so, nearest elsewhere.

    The factorization of one input's moments is kept for the siblings and slices that follow. device: where to solve;
    default the weight's own. error, error_nearest: sums of e H e^T over everything rounded so far.
    """

    def __init__(self, moments: MomentSource, device: torch.device | str | None = None) -> None:
        self.moments, self.device = moments, device
        self.error = self.error_nearest = 0.0
        self._lock, self._working = Lock(), Lock()
        self._kept: OrderedDict[str, Future[Curvature]] = OrderedDict()

    def __call__(self, x: torch.Tensor, rule: Rule, scale: torch.Tensor | None, module: str) -> ScaledTensor:
        """x [N, K] (any whole number of scale tiles of a weight), scale or None as in `octavo.quantize`."""
        return self.together([(x, rule, scale, module)])[0]

    def together(self, jobs: Sequence[Job]) -> list[ScaledTensor]:
        """Several calls in one, on a CPU in much less time: matrices of one shape stand side by side."""
        found: dict[int, ScaledTensor] = {}
        siblings: dict[tuple[str, Rule], list[int]] = {}
        for i, (x, rule, scale, module) in enumerate(jobs):
            place = torch.device(self.device) if self.device is not None else x.device
            if rule.rounding == "nearest":
                found[i] = quantize(x, rule, scale=scale)
            elif place.type == "cpu" and x.numel() and all_finite(x):
                siblings.setdefault((self.moments.key(module), rule), []).append(i)
            else:
                found[i] = self._alone(x, rule, scale, module, place)
        stacks: dict[tuple[int, int, Rule], list[list[int]]] = {}
        for (_, rule), members in siblings.items():
            rows, k = sum(len(jobs[i][0]) for i in members), jobs[members[0]][0].shape[1]
            stacks.setdefault((rows, k, rule), []).append(members)
        for alike in stacks.values():
            found |= self._stack(jobs, alike)
        return [found[i] for i in range(len(jobs))]

    def _stack(self, jobs: Sequence[Job], alike: list[list[int]]) -> dict[int, ScaledTensor]:
        """alike: indices of jobs, those with one input together, as one matrix; all of one shape."""
        rule, cpu = jobs[alike[0][0]][1], torch.device("cpu")
        scales, matrices = {}, []
        for members in alike:
            curvature = self._curvature(jobs[members[0]][3], cpu)
            weights, expanded = [], []
            for i in members:
                x, _, scale, _ = jobs[i]
                weights.append(x.cpu())
                scales[i] = self._scale(weights[-1], rule, curvature) if scale is None else scale.cpu()
                by_row = rule.granularity.tile[1] == 0
                expanded.append(rule.granularity.expand(scales[i], tuple(x.shape)).expand(len(x), 1 if by_row else -1))
            matrices.append(Matrix(torch.cat(weights), torch.cat(expanded), curvature))
        result = {}
        for members, rounded in zip(alike, compensated_stack(matrices, rule.spec), strict=True):
            self._count(rounded)
            rows = [len(jobs[i][0]) for i in members]
            for i, codes in zip(members, torch.split(rounded.codes, rows), strict=True):
                device = jobs[i][0].device
                result[i] = ScaledTensor(codes.to(device), scales[i].to(device), rule.spec, rule.granularity)
        return result

    def _alone(
        self, x: torch.Tensor, rule: Rule, scale: torch.Tensor | None, module: str, place: torch.device
    ) -> ScaledTensor:
        with self._working:  # the threads of a conversion would hold a matrix of the GPU's memory each
            curvature, here = self._curvature(module, place), x.to(place)
            scale = self._scale(here, rule, curvature) if scale is None else scale.to(place)
            found = compensated(here, curvature, scale, rule.granularity, rule.spec, columns=columns_for(place))
        self._count(found)
        return ScaledTensor(found.codes.to(x.device), scale.to(x.device), rule.spec, rule.granularity)

    def _count(self, found: Rounded) -> None:
        with self._lock:
            self.error += float(found.error.double().sum())
            self.error_nearest += float(found.error_nearest.double().sum())

    def _scale(self, x: torch.Tensor, rule: Rule, curvature: Curvature) -> torch.Tensor:
        """The scales that the rule's method finds, on x's device."""
        if rule.method == "hessian":
            every = 2 if rule.granularity.tile[0] == 1 else 1  # rows: half of the time, and hardly worse
            return mse_scale(x, rule.spec, rule.granularity, rule.scale_format, curvature.diagonal, every)
        return quantize(x, replace(rule, rounding="nearest")).scale

    def _curvature(self, module: str, place: torch.device) -> Curvature:
        key = self.moments.key(module)
        with self._lock:
            found = self._kept.get(key)
            if mine := found is None:
                while len(self._kept) >= KEPT:
                    self._kept.popitem(last=False)
                found = self._kept[key] = Future()
            self._kept.move_to_end(key)
        if mine:  # outside of the lock: other threads may factorize others meanwhile
            try:
                found.set_result(Curvature.of(self.moments.get(module).to(place)))
            except BaseException as error:
                found.set_exception(error)
        try:
            return found.result()
        except DataError as error:
            what = f"{module}: {error.what}"
            raise DataError(what, got=error.got, need=error.need, fix=error.fix) from None
