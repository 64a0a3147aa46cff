"""The report of tune as one HTML page: the curve of size against divergence as an inline SVG, and the exceptions."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.pipelines.tune import Point, TuneReport

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 360, 70, 40
STYLE = "body{font:15px sans-serif;max-width:52em;margin:2em auto}td,th{padding:2px 12px 2px 0;text-align:left}"


def page(report: TuneReport) -> str:
    """A page that needs no network and no script."""
    title = html.escape(f"{report.model}: {report.scheme}, rounding {report.rounding}, layout {report.layout}")
    error = "" if report.kl_se is None else f" ± {report.kl_se:.5f}"
    facts = (
        f"KL {report.kl_fp8:.5f} with everything in FP8, {report.kl:.5f}{error} with this policy, over {report.tokens} "
        f"tokens. {report.bytes:,} bytes, {report.share:.2%} of them in layers kept in 16 bit; {report.bytes_fp8:,} "
        f"all in FP8, {report.bytes_16bit:,} all in 16 bit. Weighed by {report.weighed}."
    )
    rows = "".join(
        f"<tr><td>{html.escape(e.unit)}<td>{e.option}<td>{e.bytes:,}<td>{e.kl:.6f}"
        f"<td>{'measured' if e.measured else 'estimated'}"
        for e in report.exceptions
    )
    table = f"<table><tr><th>layers<th>take<th>more bytes<th>KL in FP8 alone<th>{rows}</table>"
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>'
        f"<p>{html.escape(facts)}</p>{curve_svg(report.curve, report.budget)}"
        f"<p>Line: predicted, from layers alone. Dots: measured as a whole.</p>{table}"
    )


def curve_svg(points: list[Point], budget: float | None = None) -> str:
    """Bytes to the right, KL upwards from zero."""
    low, high = points[0].bytes, points[-1].bytes
    top = 1.08 * max(point.kl for point in points) or 1.0

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (size - low) / max(high - low, 1)

    def y(kl: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * kl / top

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="size against divergence" font-size="12">']
    for tick in _ticks(top):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for i in range(5):
        size = low + (high - low) * i / 4
        text = f"{size / 1e6:.4g} MB"
        parts.append(f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>')
    line = " ".join(f"{x(p.bytes):.1f},{y(p.kl):.1f}" for p in points if not p.measured)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#36c" stroke-width="2"/>')
    if budget is not None:
        parts.append(f'<path d="M{LEFT} {y(budget):.1f}H{WIDTH - 20}" stroke="#c33" stroke-dasharray="5 4"/>')
    for p in points:
        if p.measured:
            title = f"<title>{p.bytes:,} bytes, KL {p.kl:.5f}</title>"
            parts.append(f'<circle cx="{x(p.bytes):.1f}" cy="{y(p.kl):.1f}" r="5" fill="#c33">{title}</circle>')
    parts.append(f'<text x="{LEFT}" y="14">KL, nats per token</text></svg>')
    return "".join(parts)


def _ticks(top: float) -> list[float]:
    """Round values from zero to the top, four to eight of them."""
    step = 10.0 ** math.floor(math.log10(top))
    while top / step < 4:
        step /= 2
    return [round(i * step, 12) for i in range(int(top / step) + 1)]
