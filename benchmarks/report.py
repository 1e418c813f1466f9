"""Rows of figures, and their formatting as a table and as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Medians by server.

    Ratios are medians of the ratios of each round, so a slow phase of the machine does not change them. `target` limits
    the ratio, `added_target` the difference.
    """

    section: str
    name: str
    values: Mapping[str, float]
    ratios: Mapping[str, float]
    target: float | None
    shows_added: bool
    added_target: float | None = None
    remark: str = ""

    @property
    def note(self) -> str:
        notes = []
        if self.shows_added:
            base, *others = self.values.values()
            notes.append(", ".join(f"{other - base:+.2f}" for other in others))
        if self.target is not None:
            verdict = "met" if max(self.ratios.values()) <= self.target else "missed"
            notes.append(f"at most {self.target:g}: {verdict}")
        if self.added_target is not None:
            base, *others = self.values.values()
            verdict = "met" if max(others) - base <= self.added_target else "missed"
            notes.append(f"at most {self.added_target:+g}: {verdict}")
        return " ".join([*notes, self.remark]).strip()


def make_row(
    section: str,
    name: str,
    samples: Mapping[str, Sequence[float]],
    *,
    target: float | None = None,
    shows_added: bool = False,
    added_target: float | None = None,
    remark: str = "",
) -> Row:
    """Build a row from samples by server. The first server is the base of the ratios."""
    (_, base), *others = samples.items()
    return Row(
        section,
        name,
        {server: statistics.median(found) for server, found in samples.items()},
        {server: _median_ratio(found, base) for server, found in others},
        target,
        shows_added,
        added_target,
        remark,
    )


def make_count_row(section: str, name: str, counts: Mapping[str, float], *, remark: str = "") -> Row:
    """Build a row of counts. Counts have no ratio, because most of them should be 0."""
    return Row(section, name, counts, {}, None, False, None, remark)


def _median_ratio(found: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(found, base, strict=True) if other)


def format_table(rows: Sequence[Row]) -> str:
    servers = list(rows[0].values)
    head = ["", *servers, *(f"{server} ratio" if len(servers) > 2 else "ratio" for server in rows[0].ratios), ""]
    lines: list[list[str] | str] = [head]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(section)
        lines.append(
            [
                f"  {row.name}",
                *(_format(value) for value in row.values.values()),
                *(f"{ratio:.2f}" for ratio in row.ratios.values()),
                row.note,
            ]
        )
    return _align(lines)


def _align(lines: Sequence[list[str] | str]) -> str:
    """Align cells in columns: first and last to the left, figures to the right.

    A line that is a string is a section heading.
    """
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = []
    for line in lines:
        if isinstance(line, str):
            aligned += ["", line]
            continue
        first, *figures, last = zip(line, widths, strict=True)
        middle = "  ".join(text.rjust(width) for text, width in figures)
        aligned.append(f"{first[0].ljust(first[1])}  {middle}  {last[0]}".rstrip())
    return "\n".join(aligned)


def _format(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**row._asdict(), "note": row.note} for row in rows]
