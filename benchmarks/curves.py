"""The curves of benchmarks/lora_quality.py as one SVG: held-out losses, and how far each is from the oracle's."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import ceil, floor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.base.page import ticks

COLOURS = {
    "bf16": "#8b93a3",
    "dequantized": "#1d2330",
    "w8a16": "#2f6fb3",
    "fused": "#c2502e",
    "compensated": "#3d8b55",
    "blocks": "#7b4fa3",
    "blocks-decoded": "#b9a3d3",
    "blocks-compensated": "#c08a1e",
}
NAMES = {
    "bf16": "BF16 base",
    "dequantized": "channels, decoded",
    "w8a16": "channels, W8A16",
    "fused": "channels, W8A8",
    "compensated": "compensated, W8A8",
    "blocks": "blocks, W8A8",
    "blocks-decoded": "blocks, decoded",
    "blocks-compensated": "blocks compensated, W8A8",
}
DASHED = ("dequantized", "w8a16", "blocks-decoded")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 330, 62, 12, 34, 46
Curve = list[tuple[float, float]]


def oracle_of(variant: str) -> str:
    """The BF16 run over the same base, decoded: what FP8 products are held against."""
    return "blocks-decoded" if variant.startswith("blocks") else "dequantized"


def figure(rows: Sequence[dict[str, Any]], limit: float) -> str:
    """rows: the curves, each with variant, seed and [step, held-out loss] pairs. limit: percent, drawn as a band."""
    losses: dict[str, dict[int, Curve]] = defaultdict(dict)
    for row in rows:
        losses[row["variant"]][row["seed"]] = [(step, loss) for step, loss in row["held_out"]]
    by_variant = {name: list(losses[name].values()) for name in NAMES if name in losses}
    gaps = {
        name: [
            [(step, 100 * (loss / other - 1)) for (step, loss), (_, other) in zip(mine, theirs[seed], strict=True)]
            for theirs in (losses.get(oracle_of(name), {}),)
            for seed, mine in losses[name].items()
            if seed in theirs
        ]
        for name in by_variant
        if name != oracle_of(name)
    }
    gaps = {name: curves for name, curves in gaps.items() if curves}
    total = 2 * WIDTH
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT + 34}" font-family="sans-serif" '
    parts = [head + 'font-size="12" fill="#1d2330">', f'<rect width="{total}" height="{HEIGHT + 34}" fill="#fff"/>']
    parts.append(_panel(0, "Held-out loss, nats a token", by_variant, None))
    parts.append(_panel(WIDTH, "Difference from BF16 over the decoded base, percent", gaps, limit))
    for i, name in enumerate(by_variant):
        x = 20 + i * (total - 20) / len(by_variant)
        parts.append(f'<line x1="{x}" x2="{x + 20}" y1="{HEIGHT + 14}" y2="{HEIGHT + 14}" {_stroke(name, 2.5)}/>')
        parts.append(f'<text x="{x + 26}" y="{HEIGHT + 18}">{NAMES[name]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(x0: float, title: str, curves: dict[str, list[Curve]], limit: float | None) -> str:
    """Every seed as a faint line, their mean as a bold one."""
    points = [point for seeds in curves.values() for curve in seeds for point in curve]
    lows, highs = min(y for _, y in points), max(y for _, y in points)
    if limit is not None:
        lows, highs = min(lows, -1.5 * limit), max(highs, 1.5 * limit)
    last, margin = max(x for x, _ in points), 0.04 * (highs - lows)
    lows, highs = lows - margin, highs + margin

    def x(value: float) -> float:
        return x0 + LEFT + (WIDTH - LEFT - RIGHT) * value / last

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (highs - value) / (highs - lows)

    parts = [f'<text x="{x(0):.0f}" y="20" font-weight="bold">{title}</text>']
    if limit is not None:
        height = y(-limit) - y(limit)
        band = f'width="{x(last) - x(0):.1f}" height="{height:.1f}" fill="#2f6fb3" opacity="0.08"'
        parts.append(f'<rect x="{x(0):.1f}" y="{y(limit):.1f}" {band}/>')
    step = ticks((highs - lows) / 2)[1]
    for value in (step * i for i in range(ceil(lows / step), floor(highs / step) + 1)):
        ends = f'x1="{x(0):.1f}" x2="{x(last):.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        parts.append(f'<line {ends} stroke="#e3e6ec"/>')
        parts.append(f'<text x="{x(0) - 6:.1f}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value in (value for value in ticks(last) if value <= last):
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:.4g}</text>')
    parts.append(f'<text x="{x(last / 2):.1f}" y="{HEIGHT - 10}" text-anchor="middle">optimizer step</text>')
    for name, seeds in curves.items():
        mean = [(at[0][0], sum(value for _, value in at) / len(at)) for at in zip(*seeds, strict=True)]
        parts.extend(_line(curve, x, y, f'{_stroke(name, 1)} opacity="0.35"') for curve in seeds)
        parts.append(_line(mean, x, y, _stroke(name, 2.5)))
    return "\n".join(parts)


def _line(curve: Curve, x: Callable[[float], float], y: Callable[[float], float], style: str) -> str:
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
    return f'<polyline points="{places}" fill="none" {style}/>'


def _stroke(name: str, width: float) -> str:
    dash = ' stroke-dasharray="6 4"' if name in DASHED else ""
    return f'stroke="{COLOURS[name]}" stroke-width="{width}"{dash}'
