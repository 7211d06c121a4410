"""A chart of lines as SVG: a few lines over a common axis, drawn by hand so that equal numbers give equal bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, FAINT, PAPER, GRID = "#2b2b2b", "#6b6b6b", "#ffffff", "#e6e6e2"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 340, 60, 20, 62, 44
"""In pixels."""
TICKS = 6


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


def tick_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, for about as many ticks as there is room for."""
    raw = span / TICKS
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0.0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)


def _text(x: float, y: float, text: str, colour: str = INK, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{style}>{escape(text)}</text>'


def chart(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    xs = [x for line in lines for x, _ in line.points]
    highest = max((y for line in lines for _, y in line.points), default=1.0)
    first, last = min(xs, default=0.0), max(xs, default=1.0)
    span = (last - first) or 1.0
    y_step = tick_step(highest or 1.0)
    top = y_step * math.ceil((highest or 1.0) / y_step)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - first) / span * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        _text(LEFT, 22, title, INK, ' font-size="14"'),
        _text(LEFT, HEIGHT - 8, x_name, FAINT),
        _text(8, TOP - 12, y_name, FAINT),
    ]
    for number in range(round(top / y_step) + 1):
        _, y = at(first, number * y_step)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        drawn.append(_text(LEFT - 8, round(y + 4, 1), f"{number * y_step:g}", FAINT, ' text-anchor="end"'))
    x_step = tick_step(span)
    for number in range(math.ceil(first / x_step), math.floor(last / x_step) + 1):
        x, _ = at(number * x_step, 0.0)
        drawn.append(_text(round(x, 1), HEIGHT - BOTTOM + 16, f"{number * x_step:g}", FAINT, ' text-anchor="middle"'))
    for place, line in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.6"{dashes}/>')
        left = LEFT + place * 190
        drawn.append(f'<path d="M{left} 40h24" stroke="{line.colour}" stroke-width="2"{dashes}/>')
        drawn.append(_text(left + 30, 44, line.name))
    return "\n".join([*drawn, "</svg>"]) + "\n"
