"""The arithmetic of a conversion, one slice of rows at a time: check, scale, quantize, hand to the writer.

A slice is small enough for its float32 temporaries to stay in the cache, and is cut at block borders, so that slices
never share a scale but for scales per tensor, which a pass over the siblings finds first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock

import torch

from octavo.base.errors import CheckpointError
from octavo.formats.granularity import Granularity, PerBlock, PerTensor
from octavo.formats.reference import quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.scale import scale_of
from octavo.formats.scaled import ScaledTensor
from octavo.store import schema
from octavo.store.moments import Moments
from octavo.store.pieces import Piece
from octavo.store.plan import Plan
from octavo.store.tensors import Checkpoint
from octavo.store.writer import ShardWriter

SLICE = 1 << 20  # values
TOGETHER = 1 << 22  # values of weights that are rounded with compensation at once: 16 MiB each time they are copied
MOMENTS_TOGETHER = 1 << 24  # values of their moments
Job = tuple[torch.Tensor, Rule, torch.Tensor | None, str]
Quantize = Callable[[torch.Tensor, Rule, torch.Tensor | None, str], ScaledTensor]
Together = Callable[[Sequence[Job]], list[ScaledTensor]]
Edit = Callable[[str, torch.Tensor], torch.Tensor]
Observe = Callable[[str, int, torch.Tensor, ScaledTensor], None]


def quantize_reference(x: torch.Tensor, rule: Rule, scale: torch.Tensor | None, module: str = "") -> ScaledTensor:
    """The oracle, as a quantizer for convert_checkpoint."""
    return quantize_ref(x, rule.spec, rule.granularity, method=rule.method, scale_format=rule.scale_format, scale=scale)


def quantize_llmcompressor(x: torch.Tensor, rule: Rule, scale: torch.Tensor | None, module: str = "") -> ScaledTensor:
    """Bytes of llm-compressor 0.14: scale and quotient in BF16, so rounded twice. For comparisons only.

    A zero tile gets BF16's epsilon as its scale, as there.
    """
    granularity = rule.granularity
    if scale is None:
        scale = (tile_amax(x, granularity) / rule.spec.max).to(torch.bfloat16)
    scale = scale.to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    quotient = x.to(torch.bfloat16) / granularity.expand(scale, tuple(x.shape))
    codes = quotient.clamp(-rule.spec.max, rule.spec.max).to(rule.spec.dtype).view(torch.uint8)
    return ScaledTensor(codes, scale.float(), rule.spec, granularity)


def row_ranges(piece: Piece, granularity: Granularity | None, values: int = SLICE) -> list[tuple[int, int]]:
    """Cut the rows of a piece into slices of about `values`, at block borders."""
    if not piece.shape:
        return [(0, 1)]
    rows, width = piece.shape[0], max(1, torch.Size(piece.shape[1:]).numel())
    step = max(1, values // width)
    if isinstance(granularity, PerBlock):
        step = max(granularity.rows, step // granularity.rows * granularity.rows)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)] or [(0, 0)]


def batches(pieces: Iterable[Piece], plan: Plan, calibrated: Moments) -> Iterator[list[Piece]]:
    """Pieces to convert in one go: most alone; small matrices to round with compensation side by side with others of
    their shape, and those with the same input always."""
    siblings: dict[tuple[str, Rule], list[Piece]] = {}
    for piece in pieces:
        found = plan.rule_of(piece)
        if found is None or found.rule is None or found.rule.rounding == "nearest":
            yield [piece]
        else:
            siblings.setdefault((calibrated.key(piece.module), found.rule), []).append(piece)
    alike: dict[tuple[Rule, tuple[tuple[int, ...], ...]], list[list[Piece]]] = {}
    for (_, rule), members in siblings.items():
        alike.setdefault((rule, tuple(piece.shape for piece in members)), []).append(members)
    for (_, shapes), groups in alike.items():
        rows, k = sum(shape[0] for shape in shapes), shapes[0][1]
        if step := min(TOGETHER // (rows * k), MOMENTS_TOGETHER // k**2):
            yield from (
                [piece for group in groups[i : i + step] for piece in group] for i in range(0, len(groups), step)
            )
        else:
            yield from ([piece] for group in groups for piece in group)


def tile_amax(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """max |x| of each tile, float32; NaN or Inf where the tile holds one. Whole blocks take two cheap passes."""
    magnitude = x.abs()
    if isinstance(granularity, PerBlock) and not x.shape[0] % granularity.rows and not x.shape[1] % granularity.cols:
        by_rows = magnitude.view(-1, granularity.rows, x.shape[1]).amax(1)
        return by_rows.view(by_rows.shape[0], -1, granularity.cols).amax(2).float()
    return granularity.reduce(magnitude).float()


class SliceWork:
    """Everything a worker needs. Calls for different slices may run at the same time."""

    def __init__(
        self,
        source: Checkpoint,
        plan: Plan,
        writer: ShardWriter,
        quantize: Quantize,
        together: Together | None = None,
        observe: Observe | None = None,
        *,
        own_scales: bool = False,
    ) -> None:
        self.source, self.plan, self.writer, self.quantize = source, plan, writer, quantize
        self.together, self.observe, self._lock = together, observe, Lock()
        self._own_scales = own_scales
        self._amax: dict[str, torch.Tensor] = {}

    def read(self, piece: Piece, start: int, stop: int, edited: torch.Tensor | None) -> torch.Tensor:
        if edited is not None:
            return edited[start:stop] if piece.shape else edited
        return piece.rows(self.source, start, stop) if piece.shape else self.source.get(piece.source)

    def measure(self, piece: Piece, start: int, stop: int, edited: torch.Tensor | None = None) -> int:
        """First pass for a scale per tensor: fold this slice's amax into its group's. Returns 0 bytes done."""
        x = self.read(piece, start, stop, edited)
        amax = self._finite(x.abs().amax().float(), piece)
        group = self.plan.amax_group[piece.module]
        with self._lock:
            self._amax[group] = torch.maximum(self._amax.get(group, amax), amax)
        return 0

    def convert(self, piece: Piece, start: int, stop: int, edited: torch.Tensor | None = None) -> int:
        """Write the slice, quantized or as it is. Returns the bytes of the source it stands for."""
        x = self.read(piece, start, stop, edited)
        size = x.numel() * self.source.dtype(piece.source).itemsize
        found = self.plan.rule_of(piece)
        if found is None or found.rule is None:
            if x.is_floating_point() and x.dtype.itemsize > 1 and x.numel():
                self._finite(x.abs().amax(), piece)
            if x.dtype != piece.dtype:
                x = x.to(piece.dtype)
            self.writer.put(piece.name, x, start)
            return size
        job = self._job(piece, found.rule, x)
        self._put(piece, start, job, self.quantize(*job))
        return size

    def convert_together(self, pieces: Sequence[tuple[Piece, torch.Tensor | None]]) -> int:
        """`convert` of whole pieces with a rule, each with its edited tensor or None, by one call of `together`."""
        assert self.together is not None
        jobs = []
        for piece, edited in pieces:
            found = self.plan.rule_of(piece)
            assert found is not None and found.rule is not None
            jobs.append(self._job(piece, found.rule, self.read(piece, 0, piece.shape[0], edited)))
        for (piece, _), job, q in zip(pieces, jobs, self.together(jobs), strict=True):
            self._put(piece, 0, job, q)
        return sum(
            job[0].numel() * self.source.dtype(piece.source).itemsize
            for (piece, _), job in zip(pieces, jobs, strict=True)
        )

    def _job(self, piece: Piece, rule: Rule, x: torch.Tensor) -> Job:
        x = x.float() if x.dtype == torch.float64 else x  # the arithmetic is float32's
        scale = None
        if isinstance(rule.granularity, PerTensor):
            scale = scale_of(self._amax[self.plan.amax_group[piece.module]], rule.spec, rule.scale_format)
        else:
            amax = self._finite(tile_amax(x, rule.granularity), piece)
            if rule.method == "absmax" and not self._own_scales:
                scale = scale_of(amax, rule.spec, rule.scale_format)
        return x, rule, scale, piece.module

    def _put(self, piece: Piece, start: int, job: Job, q: ScaledTensor) -> None:
        x, rule, _, _ = job
        self.writer.put(piece.name, q.as_float8(), start)
        self._put_scale(piece, rule, q, start)
        if self.observe is not None:
            with self._lock:
                self.observe(piece.module, start, x, q)

    def _put_scale(self, piece: Piece, rule: Rule, q: ScaledTensor, start: int) -> None:
        name = schema.scale_name(piece.module, rule.granularity, self.plan.layout)
        dtype = self.writer.entries[name][0]
        stored = schema.scale_to_file(q.scale, rule.granularity, self.plan.layout).to(dtype)
        per_tensor = isinstance(rule.granularity, PerTensor)
        if not per_tensor or start == 0:
            self.writer.put(name, stored, 0 if per_tensor else start // rule.granularity.tile[0])
        if start == 0 and piece.module in self.plan.input_scales:
            name = f"{piece.module}.{schema.INPUT_SCALE}"
            value = torch.tensor(self.plan.input_scales[piece.module], dtype=torch.float32)
            self.writer.put(name, value.reshape(self.writer.entries[name][1]))

    def _finite(self, amax: torch.Tensor, piece: Piece) -> torch.Tensor:
        if not bool(torch.isfinite(amax.float().sum())) and not bool(torch.isfinite(amax).all()):
            raise self._complaint(piece)
        return amax

    def _complaint(self, piece: Piece) -> CheckpointError:
        """Names file, tensor, and the first bad value with its place."""
        where = f"{self.source.folder / self.source.file_of(piece.source)}: tensor {piece.source}"
        fix = "Training diverged, or the file is damaged: take an earlier checkpoint."
        for start, stop in row_ranges(piece, None) if piece.whole else []:
            values = self.read(piece, start, stop, None)
            bad = torch.nonzero(~torch.isfinite(values))
            if len(bad):
                place = [int(index) for index in bad[0]]
                got = f"{float(values[tuple(place)])} at {[place[0] + start, *place[1:]] if place else []}"
                return CheckpointError(where, got=got, need="finite weights", fix=fix)
        return CheckpointError(where, got=f"NaN or Inf in {piece.name}", need="finite weights", fix=fix)
