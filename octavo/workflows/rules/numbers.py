"""Are the numbers plausible, without a reference: scales, NaN codes, saturation, magnitude, orientation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from octavo.formats.granularity import Granularity, PerBlock, PerRow, PerTensor
from octavo.workflows.rules.findings import REQUANTIZE, Findings
from octavo.workflows.rules.model import INPUT_SCALES, Model, Module
from octavo.workflows.rules.scan import HALF_CODE, TOP_CODE, Array, TileStats, has_nonfinite, scan_codes
from octavo.workflows.rules.scheme import Scheme

# Weights of trained linears have rms * sqrt(K) between about 0.05 and 30; a scale stored as its reciprocal, or without
# the division by 448, leaves that range by factors of 100 and more.
GAIN_MAX, GAIN_ODD = 150.0, 60.0
GAIN_MIN = 2e-4
MEDIAN_MIN, MEDIAN_OF = 0.01, 6  # of all matrices of a model: a few may be nearly dead, half of them are not
PEAK_MAX = 5000.0
# Uniform weights, as layers are initialized, have 3.6 % of their codes at 448 under an absmax scale.
TOPS_ODD, TOPS_BAD = 0.05, 0.25
# Frequencies fall towards the largest code, 448, which stands for half as wide an interval as 416 below it. More of it
# than of 416 is what clipping leaves behind: a scale too small, or an update added to the codes.
SPIKE, SPIKE_SHARE = 1.5, 0.01
ZEROS_ODD = 0.65
THREADS = 2
THREADS_FROM = 32 << 20  # bytes

T = TypeVar("T")
R = TypeVar("R")


def granularity_of(module: Module, scheme: Scheme) -> tuple[str, Granularity] | None:
    """(name of the weight scale, its granularity), read off the shapes; None where they do not fit together."""
    weight = module.weight
    if weight is None or len(weight.shape) < 2:
        return None
    blocks = [g.weights.block for g in scheme.groups if g.weights and g.weights.block]
    if scheme.weights is not None and scheme.weights.block:
        blocks.append(scheme.weights.block)
    for scale in module.scales.values():
        candidates: list[Granularity] = [PerTensor(), PerRow()]
        candidates += [PerBlock(*block) for block in dict.fromkeys([*blocks, (128, 128)])]
        for granularity in candidates:
            want = granularity.scale_shape(weight.shape)
            scalar = want == () and scale.shape in ((), (1,), (1, 1))
            row = isinstance(granularity, PerRow) and scale.shape == weight.shape[:-1]
            if scalar or row or (want != () and scale.shape == want):
                return scale.name, granularity
    return None


def check_numbers(model: Model, scheme: Scheme, out: Findings, advance: Callable[[float], None]) -> None:
    """Every tensor of the folder, in the order of its bytes; two threads, a few slices in memory."""
    owners = {stored.name: module for module in model.modules.values() for stored in module.leaves.values()}

    gains: list[float] = []

    def look(name: str) -> list[tuple[str, str, str, str, str]]:
        local = Findings()
        _check_tensor(model, scheme, owners[name], name, gains, local)
        advance(float(model.checkpoint.info(name).nbytes))
        return [(f.severity, f.code, f.where, f.message, f.fix) for f in local.all()]

    for found in in_threads(look, model.checkpoint.names(), model.checkpoint.nbytes):
        for severity, code, where, message, fix in found:
            out.add(severity, code, where, message, fix)  # type: ignore[arg-type]
    if len(gains) >= MEDIAN_OF and (middle := sorted(gains)[len(gains) // 2]) < MEDIAN_MIN:
        text = (
            f"Half of the {len(gains)} FP8 weights have rms * sqrt(K) below {middle:.2g}; trained ones have 0.05 to 30."
        )
        out.error("scale-implausible", scheme.key, f"{text} The scales are too small.", REQUANTIZE)


def in_threads(look: Callable[[T], R], items: Sequence[T], nbytes: int) -> Iterator[R]:
    """`look` over all items, in order. nbytes: of all of them; tiny tensors are read sooner than handed over."""
    if nbytes < THREADS_FROM:
        yield from map(look, items)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(look, items)


def _check_tensor(model: Model, scheme: Scheme, module: Module, name: str, gains: list[float], out: Findings) -> None:
    checkpoint = model.checkpoint
    shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
    if 0 in shape:
        return
    weight = module.weight
    scale_names = {s.name for leaf, s in module.leaves.items() if leaf in (*module.scales, *INPUT_SCALES)}
    is_scale = name in scale_names or name.endswith(("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale"))
    if is_scale:
        _check_scale(checkpoint.get(name), name, out)
    elif weight is not None and weight.name == name and dtype == torch.float8_e4m3fn:
        if len(shape) >= 2:
            _check_codes(model, scheme, module, gains, out)
    elif has_nonfinite(checkpoint, name):
        out.error("not-finite", name, "The tensor holds NaN or Inf.", "Fetch or convert the weights again.")


def _check_scale(scale: torch.Tensor, name: str, out: Findings) -> None:
    if not scale.dtype.is_floating_point:
        return
    values = scale.float()
    wrong = []
    if not bool(torch.isfinite(values).all()):
        wrong.append("NaN or Inf")
    if bool((values == 0).any()):
        wrong.append("zeros")
    if bool((values < 0).any()):
        wrong.append("negative values")
    if wrong:
        count = int((~(torch.isfinite(values) & (values > 0))).sum())
        text = f"A scale must be finite and positive; {count} of {values.numel()} are not ({', '.join(wrong)})."
        out.error("scale-not-positive", name, text, REQUANTIZE)


def _check_codes(model: Model, scheme: Scheme, module: Module, gains: list[float], out: Findings) -> None:
    weight = module.weight
    assert weight is not None
    found = granularity_of(module, scheme)
    granularity = found[1] if found else PerRow()
    tile = granularity.tile
    stats = scan_codes(model.checkpoint, weight.name, tile if len(weight.shape) == 2 else (1, 0))
    if stats.nan_tiles:
        text = f"NaN codes (0x7F or 0xFF) in {stats.nan_tiles} of {stats.peak.size} {_tiles(granularity)}."
        out.error("nan-codes", weight.name, text, f"{REQUANTIZE} The converter must saturate at 448.")
    if not stats.peak.any():
        out.warn("all-zero", weight.name, "Every code of this weight is zero.", "Check the source weights.")
        return
    _check_spread(weight.name, stats, granularity, out)
    _check_orientation(weight.name, weight.shape, stats, granularity, out)
    if found is None or len(weight.shape) != 2:
        return
    scale = model.checkpoint.get(found[0])
    if not scale.dtype.is_floating_point:
        return
    values = scale.double().reshape(granularity.scale_shape(weight.shape)).numpy()
    gain = _check_magnitude(found[0], weight.shape, stats, values, granularity, out)
    gains += [gain] if gain is not None else []
    if isinstance(granularity, PerBlock):
        _check_grid(found[0], stats, values, out)


def _tiles(granularity: Granularity) -> str:
    return "blocks" if isinstance(granularity, PerBlock) else "rows"


def _check_spread(name: str, stats: TileStats, granularity: Granularity, out: Findings) -> None:
    fix = REQUANTIZE
    own = stats.peak.size / stats.size  # the largest value of a tile is 448 by right
    chance = 3 * math.sqrt(TOPS_ODD / max(stats.sampled, 1))  # three standard deviations of a share this small
    spike = stats.tops > SPIKE * stats.below and stats.tops > SPIKE_SHARE + own
    if stats.tops > TOPS_BAD or (spike and stats.sampled >= 1024):
        text = f"{stats.tops:.1%} of the codes are +-448, {stats.below:.1%} are +-416: the weights are clipped."
        out.error("saturated", name, text, fix)
    elif stats.tops > TOPS_ODD + own + chance and stats.sampled >= 1024:
        out.warn("saturated", name, f"{stats.tops:.1%} of the codes are +-448: large weights are clipped.", fix)
    if stats.zeros > ZEROS_ODD and stats.sampled >= 1024:
        text = f"{stats.zeros:.0%} of the codes are zero: the scale is too large, or the weights are sparse."
        out.warn("underflow", name, text, fix)
    live = stats.peak[(stats.peak > 0)]
    unused = float((live < HALF_CODE).mean()) if live.size else 0.0
    if not isinstance(granularity, PerTensor) and unused > 0.5:
        text = (
            f"In {unused:.0%} of the {_tiles(granularity)} no code exceeds 224: their scales are larger than need be."
        )
        out.info("range-unused", name, text)


def _check_orientation(
    name: str, shape: tuple[int, ...], stats: TileStats, granularity: Granularity, out: Findings
) -> None:
    """An absmax scale per row lets every row reach 448. Where every column does and not every row, it was transposed.

    Only for square matrices: in others the shape of the scale already tells. By chance 63 % of the columns reach 448.
    """
    if not isinstance(granularity, PerRow) or len(shape) != 2 or shape[0] != shape[1] or shape[0] < 64:
        return
    rows = float((stats.peak >= TOP_CODE).mean())
    columns = float((stats.columns >= TOP_CODE).mean())
    if rows < 0.9 and columns > 0.995:
        text = f"Only {rows:.0%} of the rows reach 448, but all columns do: the matrix is transposed."
        out.error("weight-transposed", name, text, REQUANTIZE)


def _check_magnitude(
    name: str,
    shape: tuple[int, ...],
    stats: TileStats,
    scale: Array,
    granularity: Granularity,
    out: Findings,
) -> float | None:
    """Says what is implausible; returns rms * sqrt(K)."""
    per_tile = scale.reshape(-1, 1) if isinstance(granularity, PerRow) else np.broadcast_to(scale, stats.peak.shape)
    good = np.isfinite(per_tile) & (per_tile > 0) & (stats.peak > 0) & np.isfinite(stats.mean_square)
    if not good.any():
        return None
    with np.errstate(over="ignore"):
        rms = math.sqrt(float(np.mean(per_tile[good] ** 2 * stats.mean_square[good])))
    gain = rms * math.sqrt(shape[1])
    biggest = float(per_tile[good].max()) * 448
    if gain > GAIN_MAX or biggest > PEAK_MAX:
        text = f"Dequantized weights have rms {rms:.3g} and reach {biggest:.3g}: implausible for a linear layer"
        if _plausible(1.0 / per_tile[good], stats.mean_square[good], shape[1]):
            text += "; with 1/scale they would be plausible, so the scale is stored as its reciprocal"
        out.error("scale-implausible", name, f"{text}.", REQUANTIZE)
    elif gain > GAIN_ODD:
        text = f"Dequantized weights have rms {rms:.3g}, far more than is usual for K = {shape[1]}: is the scale right?"
        out.warn("scale-unusual", name, text, "Compare with the 16-bit model: --reference MODEL.")
    elif gain < GAIN_MIN and stats.zeros < ZEROS_ODD:
        text = f"Dequantized weights have rms {rms:.3g}, far less than is usual for K = {shape[1]}: is the scale right?"
        out.warn("scale-unusual", name, text, "Compare with the 16-bit model: --reference MODEL.")
    return gain


def _plausible(scale: Array, mean_square: Array, cols: int) -> bool:
    gain = math.sqrt(float(np.mean(scale**2 * mean_square)) * cols)
    return GAIN_MIN < gain < GAIN_ODD


def _check_grid(name: str, stats: TileStats, scale: Array, out: Findings) -> None:
    """A block with an outlier has a large scale and small codes: the logs of the two run against each other.

    If they do so only after the square grid is transposed, it was stored transposed. Sound from about 6 x 6 blocks on.
    """
    rows, cols = scale.shape
    if rows != cols or rows < 6 or not ((scale > 0) & np.isfinite(scale)).all() or not (stats.mean_square > 0).all():
        return
    codes, logs = np.log(stats.mean_square), np.log(scale)
    off = ~np.eye(rows, dtype=bool)
    if logs[off].std() < 1e-3 or codes[off].std() < 1e-6:
        return
    stored = float(np.corrcoef(logs[off], codes[off])[0, 1])
    turned = float(np.corrcoef(logs.T[off], codes[off])[0, 1])
    if turned < -0.7 and stored > -0.25:
        text = f"Scales fit the codes only with the grid transposed (correlation {turned:.2f}, as stored {stored:.2f})."
        out.error("grid-transposed", name, text, REQUANTIZE)
