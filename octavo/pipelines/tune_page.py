"""The report of tune as one HTML page: the curve of size against divergence as an inline SVG, and the exceptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.base.page import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, heading, page, table, ticks, verdict

if TYPE_CHECKING:
    from octavo.pipelines.tune_report import Point, TuneReport

COLUMNS = ("layers", "take", "more bytes", "KL in FP8 alone", "")
RIGHT = WIDTH - 20


def tune_page(report: TuneReport) -> bytes:
    """The whole file."""
    error = "" if report.kl_se is None else f" ± {report.kl_se:.5f}"
    facts = (
        f"KL {report.kl_fp8:.5f} with everything in FP8, {report.kl:.5f}{error} with this policy, over {report.tokens} "
        f"tokens. {report.bytes:,} bytes, {report.share:.2%} of them in layers kept in 16 bit; {report.bytes_fp8:,} "
        f"all in FP8, {report.bytes_16bit:,} all in 16 bit. Weighed by {report.weighed}."
    )
    rows = [
        (e.unit, e.option, f"{e.bytes:,}", f"{e.kl:.6f}", "measured" if e.measured else "estimated")
        for e in report.exceptions
    ]
    title = f"{report.model}: {report.scheme}, rounding {report.rounding}, layout {report.layout}"
    chart = curve_chart("Line: predicted, from layers alone. Dots: measured as a whole.", report.curve, report.budget)
    return page(title, [verdict(facts), chart, heading("Not as the scheme has it"), table(COLUMNS, rows)])


def curve_chart(title: str, points: Sequence[Point], budget: float | None = None) -> str:
    """An SVG figure: bytes to the right, KL upwards from zero; the budget as a broken line."""
    low, high = points[0].bytes, points[-1].bytes
    steps = ticks(max(point.kl for point in points))

    def x(size: float) -> float:
        return LEFT + (RIGHT - LEFT) * (size - low) / max(high - low, 1)

    def y(kl: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * kl / steps[-1]

    parts = [f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in steps:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for i in range(5):
        size = low + (high - low) * i / 4
        text = f"{size / 1e6:.4g} MB"
        parts.append(f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>')
    if budget is not None and budget <= steps[-1]:
        parts.append(f'<path class="error" d="M{LEFT} {y(budget):.1f}H{RIGHT}" stroke-dasharray="5 4"/>')
    return "".join([*parts, *_marks(points, x, y), "</svg></figure>"])


def _marks(points: Sequence[Point], x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    line = " ".join(f"{x(p.bytes):.1f},{y(p.kl):.1f}" for p in points if not p.measured)
    dots = [
        f'<circle class="mark" cx="{x(p.bytes):.1f}" cy="{y(p.kl):.1f}" r="5">'
        f"<title>{p.bytes:,} bytes, KL {p.kl:.5f}</title></circle>"
        for p in points
        if p.measured
    ]
    return [f'<polyline points="{line}" fill="none" stroke="var(--bar)" stroke-width="2"/>', *dots]
