"""`antiphon usage`: the requests, tokens and costs in the store, as a table and a bar chart of the days."""

import asyncio
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from antiphon.cli.missing_store import is_missing
from antiphon.cli.settings import load_settings
from antiphon.errors import ConfigError
from antiphon.store.location import locate_store
from antiphon.store.usage import DAY, UsageRow
from antiphon.text_table import format_table, measure_columns, measure_table, replace_controls, shorten_text

_FIELDS = {"project": "project", "key": "key_id", "model": "model"}
_COUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
_HEADINGS = ("REQUESTS", "INPUT", "CACHED", "OUTPUT", "COST")
_MIN_BAR = 10
_MAX_BAR = 60
# A shortened name is not shorter than this.
_MIN_NAME = 16
# The columns that a narrow terminal does not show, in this order.
_LEFT_OUT = ("CACHED", "REQUESTS", "OUTPUT", "INPUT")


def run(arguments: Namespace) -> int:
    settings = load_settings(arguments, store=arguments.store)
    if settings.stateless and arguments.store is None:
        raise ConfigError("stateless: a stateless server stores no usage. Name another store by --store.")
    if settings.store.startswith("memory:"):
        raise ConfigError("A memory store has no lasting usage: its data is lost when the server ends.")
    end = int(time.time())
    start = end - end % DAY - (arguments.days - 1) * DAY
    rows = [] if is_missing(settings.store) else asyncio.run(_read(settings.store, start, end))
    groups = _total(rows, _FIELDS[arguments.by])
    days = _total(rows, "started_at")
    if arguments.json:
        fields = {
            "start_time": start,
            "end_time": end,
            "currency": settings.run_currency,
            "by": arguments.by,
            "groups": [{arguments.by: name, **totals} for name, totals in groups],
            "days": [{"start_time": day, **totals} for day, totals in days],
        }
        print(msgspec.json.encode(fields).decode())
        return 0
    if not rows:
        print(f"There is no usage in the last {arguments.days} days.")
        return 0
    _print_table(arguments.by, groups, settings.run_currency)
    print()
    _print_chart(range(start, end + 1, DAY), dict(days))
    return 0


async def _read(url: str, start: int, end: int) -> list[UsageRow]:
    store = locate_store(url)
    await store.open()
    try:
        return await store.list_usage(start, end + 1, width=DAY)
    finally:
        await store.close()


def _total(rows: Sequence[UsageRow], field: str) -> list[tuple[Any, dict[str, float]]]:
    """Return the totals of each value of a field, in the order of the values."""
    totals: dict[Any, dict[str, float]] = {}
    for row in rows:
        total = totals.setdefault(getattr(row, field), dict.fromkeys((*_COUNTS, "cost"), 0))
        for name in total:
            total[name] += getattr(row, name)
    return sorted(totals.items())


def _print_table(by: str, groups: Iterable[tuple[str, dict[str, float]]], currency: str) -> None:
    rows = [[by.upper(), *_HEADINGS]]
    for name, totals in groups:
        counts = (f"{totals[count]:,}" for count in _COUNTS)
        rows.append([replace_controls(name) or "-", *counts, f"{totals['cost']:,.4f} {currency}"])
    if sys.stdout.isatty():
        _fit(rows, shutil.get_terminal_size().columns)
    for line in format_table(rows, right=range(1, len(rows[0]))):
        print(line)


def _fit(rows: list[list[str]], columns: int) -> None:
    """Make a table narrower until it fits the terminal, if possible.

    Names are shortened to `_MIN_NAME` first, then columns are left out. Costs are always shown.
    """
    needed = min(_MIN_NAME, measure_columns(rows)[0])
    for heading in _LEFT_OUT:
        if _find_room(rows, columns) < needed:
            left_out = rows[0].index(heading)
            for row in rows:
                del row[left_out]
    limit = max(_MIN_NAME, _find_room(rows, columns))
    for row in rows:
        row[0] = shorten_text(row[0], limit)


def _find_room(rows: list[list[str]], columns: int) -> int:
    """Return the width of a terminal that is left for names."""
    return columns - measure_table(rows) + measure_columns(rows)[0]


def _print_chart(days: Iterable[int], totals: dict[int, dict[str, float]]) -> None:
    """Print a bar for the tokens of each day."""
    tokens = {day: int(_sum_tokens(totals.get(day))) for day in days}
    most = max(tokens.values())
    labels = {day: f"{count:,}" for day, count in tokens.items()}
    label_width = max(map(len, labels.values()))
    room = shutil.get_terminal_size().columns - len("2024-01-01") - label_width - 4
    width = max(_MIN_BAR, min(_MAX_BAR, room))
    block = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    print("Tokens by day (UTC)")
    for day, count in tokens.items():
        # A day with usage always has a bar.
        length = 0 if not most or not count else max(1, round(width * count / most))
        print(
            f"{datetime.fromtimestamp(day, UTC):%Y-%m-%d}  {labels[day].rjust(label_width)}  {block * length}".rstrip()
        )


def _sum_tokens(totals: dict[str, float] | None) -> float:
    return 0 if totals is None else totals["input_tokens"] + totals["output_tokens"]
