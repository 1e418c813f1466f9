"""The bar chart of the comparison with other servers, as SVG."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.side_by_side.servers import PEERS

_PANELS = (
    ("Requests a second: whole answers of 200 tokens, 32 at once", "plain", "rate"),
    ("Events a second: unpaced streams of 200 tokens, 32 at once", "streamed", "event_rate"),
    ("CPU time of the server, µs a streamed event (less is better)", "streamed", "event_cpu"),
)
_WIDTH, _LABELS, _BAR, _GAP, _TITLE = 760, 190, 20, 8, 34
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .ours { fill: #1f6feb; }
  .other { fill: #8c959f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .ours { fill: #4493f8; }
    .other { fill: #6e7681; }
  }
"""


def draw(figures: Mapping[str, Any]) -> str:
    """Return the chart. The bars of a panel have one linear scale."""
    parts: list[str] = []
    top = 10
    for title, name, key in _PANELS:
        bars = _collect(figures, name, key)
        if bars:
            parts += _draw_panel(title, bars, top)
            top += _TITLE + len(bars) * (_BAR + _GAP) + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" '
        'role="img" aria-label="Antiphon and other servers of the Responses API, side by side">'
    )
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>"]) + "\n"


def _collect(figures: Mapping[str, Any], name: str, key: str) -> list[tuple[str, float]]:
    for work in figures["works"]:
        if (work["name"], work["concurrency"], work["store"]) == (name, 32, True):
            found = [(peer.name, work["servers"].get(peer.name, {}).get(key)) for peer in PEERS]
            return [(server, value) for server, value in found if value is not None]
    return []


def _draw_panel(title: str, bars: Sequence[tuple[str, float]], top: int) -> list[str]:
    most = max(value for _, value in bars)
    parts = [f'<text class="title" x="0" y="{top + 16}">{title}</text>']
    for index, (server, value) in enumerate(bars):
        y = top + _TITLE - 4 + index * (_BAR + _GAP)
        width = max(1, round((_WIDTH - _LABELS - 80) * value / most))
        kind = "ours" if server.startswith("Antiphon") else "other"
        parts += [
            f'<text x="{_LABELS - 10}" y="{y + 15}" text-anchor="end">{server}</text>',
            f'<rect class="{kind}" x="{_LABELS}" y="{y}" width="{width}" height="{_BAR}" rx="2"/>',
            f'<text x="{_LABELS + width + 6}" y="{y + 15}">{value:,.0f}</text>',
        ]
    return parts
