"""One HTML file that needs nothing else: text, tables and bar charts as inline SVG, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #fff; --faint: #8b93a3; --grid: #e3e6ec; --bar: #2f6fb3;
  --mark: #c2502e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14171d; --faint: #8d96a8; --grid: #2b313c;
  --bar: #6aa5e3; --mark: #f08a63; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { text-align: left; padding: .25rem 1.2rem .25rem 0;
  border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums; }
figure { margin: 1.5rem 0; overflow-x: auto; } figcaption { font-weight: 600; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--grid); } .axis { stroke: var(--faint); } .bar { fill: var(--bar); } .mark { fill: var(--mark); }
.error { stroke: var(--ink); stroke-width: 1.2; } .verdict { border-left: 4px solid var(--bar); padding-left: .8rem; }
"""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 280, 74, 62, 14


@dataclass(frozen=True)
class Bar:
    """error: half the height of the error bar, None for none. marked: in another colour. hint: shown on hovering."""

    label: str
    value: float
    error: float | None = None
    marked: bool = False
    hint: str = ""


def bar_chart(title: str, x_label: str, y_label: str, bars: Sequence[Bar]) -> str:
    """An SVG figure with labelled axes; values from zero. Every label is written where there is room for it."""
    top = max((bar.value + (bar.error or 0.0) for bar in bars), default=0.0)
    steps = ticks(top)
    plot_w, plot_h = WIDTH - LEFT - 10, HEIGHT - BOTTOM - TOP
    step = plot_w / max(len(bars), 1)

    def y(value: float) -> float:
        return TOP + plot_h * (1 - (value if value > 0 else 0.0) / steps[-1])  # NaN is no height

    parts = [f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f"<title>{escape(title)}</title>")
    for tick in steps:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    every = max(1, math.ceil(max((len(bar.label) for bar in bars), default=1) * 7.5 / step))
    for i, bar in enumerate(bars):
        x, middle = LEFT + i * step, LEFT + (i + 0.5) * step
        hint = escape(bar.hint or f"{bar.label}: {bar.value:.4g}")
        kind, height = "mark" if bar.marked else "bar", TOP + plot_h - y(bar.value)
        parts.append(
            f'<rect class="{kind}" x="{x + 0.15 * step:.1f}" y="{y(bar.value):.1f}" width="{0.7 * step:.1f}" '
            f'height="{height:.1f}"><title>{hint}</title></rect>'
        )
        if bar.error:
            ends = f'y1="{y(bar.value - bar.error):.1f}" y2="{y(bar.value + bar.error):.1f}"'
            parts.append(f'<line class="error" x1="{middle:.1f}" x2="{middle:.1f}" {ends}/>')
        if i % every == 0:
            label = f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(bar.label)}</text>'
            parts.append(label)
    axis = f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 10}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    name = f'<text x="{LEFT + plot_w / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>'
    middle_y = TOP + plot_h / 2
    turned = f'<text transform="translate(14 {middle_y:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    return "".join([*parts, axis, name, turned, "</svg></figure>"])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; no head where columns is empty."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if columns else ''}{body}</table>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def verdict(text: str) -> str:
    """A sentence that stands out."""
    return f'<p class="verdict">{escape(text)}</p>'


def page(title: str, parts: Sequence[str]) -> bytes:
    """The whole file, UTF-8. parts: what the functions above return."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    head += f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
    return f"{head}<body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n".encode()


def ticks(top: float) -> list[float]:
    """Four to six round steps from zero to at least `top`."""
    if not top > 0 or not math.isfinite(top):
        return [0.0, 1.0]
    raw = top / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]
