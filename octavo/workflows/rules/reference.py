"""The numbers of a checkpoint against the 16-bit model it was made from, tensor by tensor, a slice at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from octavo.formats.granularity import Granularity, PerBlock, PerTensor
from octavo.store.tensors import Checkpoint
from octavo.workflows.rules.findings import REQUANTIZE, Finding, Findings
from octavo.workflows.rules.model import Model, Module
from octavo.workflows.rules.numbers import granularity_of, in_threads
from octavo.workflows.rules.scan import Array, as_float32, decode_fast
from octavo.workflows.rules.scheme import Scheme

# Rounding to E4M3 costs 2 to 4 % (Gaussian 2.65 %, requantized 3.8 %, merged shards up to 4.5 %).
FP8_ODD, FP8_BAD = 0.055, 0.08
# 16-bit tensors are copied; half precision to the other half costs up to 0.4 %.
COPY_ODD, COPY_BAD = 0.006, 0.05
SLICE_ELEMENTS = 1 << 19


@dataclass
class Distance:
    """Sums over a tensor: |a - b|^2, |a|^2, |b|^2, <a, b>."""

    diff: float = 0.0
    mine: float = 0.0
    theirs: float = 0.0
    dot: float = 0.0

    def add(self, a: Array, b: Array) -> None:
        """float32, up to a few million values: BLAS sums such a piece exactly enough. `a` is overwritten."""
        a, b = a.reshape(-1), b.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite shows in `relative`
            self.mine += float(np.dot(a, a))
            self.theirs += float(np.dot(b, b))
            self.dot += float(np.dot(a, b))
            a -= b
            self.diff += float(np.dot(a, a))

    @property
    def relative(self) -> float:
        """|a - b| / |b|; 0 for two zero tensors, inf where only the reference is zero or something is not finite."""
        if not math.isfinite(self.diff):
            return math.inf
        if self.theirs == 0:
            return 0.0 if self.mine == 0 else math.inf
        return math.sqrt(self.diff / self.theirs)

    @property
    def cosine(self) -> float:
        norm = math.sqrt(self.mine * self.theirs)
        return self.dot / norm if norm and math.isfinite(norm) else 0.0

    @property
    def ratio(self) -> float:
        return math.sqrt(self.mine / self.theirs) if self.theirs else math.inf


def compare_numbers(
    model: Model, scheme: Scheme, reference: Checkpoint, out: Findings, advance: Callable[[float], None]
) -> dict[str, float]:
    """Relative error of every tensor that both hold: module -> error. What is wrong goes to `out`."""
    errors: dict[str, float] = {}
    work = [
        (module, stored.name)
        for module in model.modules.values()
        for leaf, stored in module.leaves.items()
        if leaf in ("weight", "bias", "") and stored.name in reference
    ]

    def look(item: tuple[Module, str]) -> tuple[float | None, list[Finding]]:
        local = Findings()
        error = _compare(model, scheme, item[0], item[1], reference, local)
        advance(float(model.checkpoint.info(item[1]).nbytes))
        return error, local.all()

    for (module, name), (error, found) in zip(work, in_threads(look, work, model.checkpoint.nbytes), strict=True):
        for finding in found:
            out.add(finding.severity, finding.code, finding.where, finding.message, finding.fix)
        if error is not None and module.quantized and module.weight is not None and name == module.weight.name:
            errors[module.name] = error
    _missing(model, reference, out)
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        mean = sum(errors.values()) / len(errors)
        text = f"{len(errors)} FP8 weights differ by {mean:.2%} on average, at most {errors[worst]:.2%} ({worst})."
        out.info("reference-error", worst, text)
    else:
        text = "No FP8 weight has a counterpart of the same name in the reference: nothing was compared."
        if model.fp8:
            out.warn(
                "reference-unrelated", str(reference.folder), text, "Give the 16-bit model this one was made from."
            )
    return errors


def _compare(
    model: Model, scheme: Scheme, module: Module, name: str, reference: Checkpoint, out: Findings
) -> float | None:
    shape, want = model.checkpoint.shape(name), reference.shape(name)
    dtype = model.checkpoint.dtype(name)
    if not reference.dtype(name).is_floating_point or reference.dtype(name).itemsize == 1:
        return None
    if shape != want:
        if len(shape) == 2 and shape == want[::-1]:
            out.error(
                "weight-transposed", name, f"Stored as {list(shape)}, the reference has {list(want)}.", REQUANTIZE
            )
        else:
            out.error("reference-shape", name, f"Shape {list(shape)}, the reference has {list(want)}.", REQUANTIZE)
        return None
    if dtype == torch.float8_e4m3fn:
        found = granularity_of(module, scheme)
        if found is None or len(shape) != 2:
            return None
        return _compare_codes(model, name, found, reference, out)
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return None
    distance = Distance()
    for start, stop in _slices(shape):
        mine = as_float32(_rows(model.checkpoint, name, start, stop))
        distance.add(mine.copy(), as_float32(_rows(reference, name, start, stop)))
    error = distance.relative
    if error > COPY_ODD:
        text = f"A 16-bit tensor, yet it differs from the reference by {error:.1%}."
        fix = "Copy it from the reference, or give the reference this checkpoint was made from."
        out.add("error" if error > COPY_BAD else "warn", "reference-differs", name, text, fix)
    return error


def _compare_codes(
    model: Model, name: str, found: tuple[str, Granularity], reference: Checkpoint, out: Findings
) -> float | None:
    shape = model.checkpoint.shape(name)
    scale_name, granularity = found
    stored = model.checkpoint.get(scale_name)
    if not stored.dtype.is_floating_point:
        return None
    scale = stored.float().reshape(granularity.scale_shape(shape))
    distance = _distance(model, name, scale, granularity, reference)
    error = distance.relative
    if error > FP8_ODD:
        guess = _diagnose(model, name, scale, granularity, reference, distance) if error > FP8_BAD else ""
        text = f"Dequantized, it differs from the reference by {error:.1%}; FP8 rounding costs 2 to 4 %.{guess}"
        out.add("error" if error > FP8_BAD else "warn", "reference-error", name, text, REQUANTIZE)
    return error


def _distance(
    model: Model,
    name: str,
    scale: torch.Tensor,
    granularity: Granularity,
    reference: Checkpoint,
    *,
    transpose: bool = False,
    limit: int | None = None,
) -> Distance:
    """limit: only so many rows, for trying out an explanation."""
    shape = model.checkpoint.shape(name)
    distance = Distance()
    grid = scale.numpy()
    theirs_all = reference.get(name) if transpose else None
    for start, stop in _slices(shape, granularity):
        if limit is not None and start >= limit:
            break
        values = decode_fast(model.checkpoint.rows(name, start, stop).view(torch.uint8).numpy())
        _apply(values, grid, granularity, start)
        theirs = theirs_all.mT[start:stop] if theirs_all is not None else reference.rows(name, start, stop)
        distance.add(values, as_float32(theirs))
    return distance


def _apply(values: Array, scale: Array, granularity: Granularity, start: int) -> None:
    """Multiply rows by their scales, in place; slices start at whole tiles."""
    rows, cols = granularity.tile
    if isinstance(granularity, PerTensor):
        values *= scale
    elif rows == 1:
        values *= scale[start : start + len(values)]
    else:
        for first in range(0, len(values), rows):
            values[first : first + rows] *= np.repeat(scale[(start + first) // rows], cols)[: values.shape[1]]


def _diagnose(
    model: Model,
    name: str,
    scale: torch.Tensor,
    granularity: Granularity,
    reference: Checkpoint,
    distance: Distance,
) -> str:
    """The one known accident that explains the difference, as a sentence, or nothing."""
    shape = model.checkpoint.shape(name)
    trials: list[tuple[str, torch.Tensor, bool]] = []
    if bool((scale > 0).all()) and bool(torch.isfinite(scale).all()):
        trials.append(("The scale is stored as its reciprocal.", 1.0 / scale, False))
        trials.append(("The scale was multiplied by 448 once too often.", scale / 448, False))
        trials.append(("The scale was divided by 448 once too often.", scale * 448, False))
    if isinstance(granularity, PerBlock) and scale.shape[0] == scale.shape[1]:
        trials.append(("The scale grid is stored transposed.", scale.T.contiguous(), False))
    if len(shape) == 2 and shape[0] == shape[1]:
        trials.append(("The matrix is stored transposed.", scale, True))
        if isinstance(granularity, PerBlock):
            trials.append(("The matrix is stored transposed, its scale grid is not.", scale.T.contiguous(), True))
    for sentence, other, transpose in trials:
        trial = _distance(model, name, other, granularity, reference, transpose=transpose, limit=512)
        if trial.relative < FP8_BAD:
            return f" {sentence}"
    if distance.cosine > 0.97 and 0.9 < distance.ratio < 1.1:
        return (
            " It is close to the reference, but not a rounding of it: a merge that never reached the weights, for one "
            "when an adapter's delta is added to the codes, looks like this."
        )
    if abs(distance.cosine) < 0.1:
        return " It has nothing to do with the reference's tensor of this name."
    return ""


def _slices(shape: tuple[int, ...], granularity: Granularity | None = None) -> list[tuple[int, int]]:
    if not shape:
        return [(0, 1)]
    width = 1
    for extent in shape[1:]:
        width *= extent
    tile = (granularity.tile[0] if granularity else 1) or 1
    step = max(tile, SLICE_ELEMENTS // max(width, 1) // tile * tile)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
    return checkpoint.rows(name, start, stop) if checkpoint.shape(name) else checkpoint.get(name)


def _missing(model: Model, reference: Checkpoint, out: Findings) -> None:
    """Tensors of the reference that this folder lost."""
    stacked = {n.rpartition(".experts.")[0] for n in model.modules if ".experts." in n}
    for name in reference.names():
        if name in model.checkpoint or name.endswith(("rotary_emb.inv_freq", ".attn.bias", "position_ids")):
            continue
        if name.endswith("lm_head.weight") and model.tied:
            continue
        if ".experts." in name and name.rpartition(".experts.")[0] in stacked:
            continue  # stored per expert here and stacked there, or the other way round
        text = "The reference holds this tensor, the folder does not."
        out.error("tensor-lost", name, text, "Convert the model again, or copy the tensor.")
