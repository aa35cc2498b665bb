"""A bar per call as SVG: its time as a share of fla-core's, the floor, and what is to be reached."""

from dataclasses import dataclass
from xml.sax.saxutils import escape

LABELS, WIDTH, ROW, TOP = 330, 420, 22, 34  # pixels
LIMIT = 1.2  # where the axis ends
OURS, PEER, FLOOR, BAR = "#2b6cb0", "#cbd5e0", "#1a202c", "#c53030"


@dataclass(frozen=True)
class Bar:
    label: str
    ours: float  # ms
    peer: float
    floor: float
    bar: float | None  # ratio to reach


def draw(bars: list[Bar]) -> str | None:
    """The plot; None without bars."""
    if not bars:
        return None
    height = TOP + ROW * len(bars) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABELS + WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        f'<text x="{LABELS}" y="14">time, as a share of fla-core\'s; '
        f'<tspan fill="{FLOOR}">black: floor</tspan>, <tspan fill="{BAR}">red: to reach</tspan></text>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(tick, TOP - 4, height - 10, "#e2e8f0"))
        parts.append(f'<text x="{_x(tick):.1f}" y="{TOP - 8}" text-anchor="middle" font-size="10">{tick:g}</text>')
    for i, bar in enumerate(bars):
        y, share = TOP + ROW * i, bar.ours / bar.peer
        end = _x(min(share, LIMIT))
        parts += [
            f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LABELS}" y="{y + 2}" width="{_x(1) - LABELS:.1f}" height="{ROW - 6}" fill="{PEER}"/>',
            f'<rect x="{LABELS}" y="{y + 5}" width="{end - LABELS:.1f}" height="{ROW - 12}" fill="{OURS}"/>',
            _line(bar.floor / bar.peer, y + 2, y + ROW - 4, FLOOR, 2),
            f'<text x="{max(end, _x(1)) + 6:.1f}" y="{y + 14}" font-size="11">{share:.2f}</text>',
        ]
        if bar.bar is not None:
            parts.append(_line(bar.bar, y, y + ROW - 2, BAR, 2))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(share: float) -> float:
    return LABELS + WIDTH * share / LIMIT


def _line(share: float, top: float, bottom: float, color: str, width: int = 1) -> str:
    x = _x(min(share, LIMIT))
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{color}" stroke-width="{width}"/>'
