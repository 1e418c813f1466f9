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

_FIELDS = {"project": "project", "key": "key_id", "model": "model"}
_COUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
_HEADINGS = ("REQUESTS", "INPUT", "CACHED", "OUTPUT", "COST")
_MIN_BAR = 10
_MAX_BAR = 60
_MAX_NAME = 40
# In a narrow terminal, a name is not shorter than this.
_MIN_NAME = 8
_GAP = "  "


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
    names = [by.upper()]
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for name, totals in groups:
        names.append(_clean(name))
        counts = (f"{totals[count]:,}" for count in _COUNTS)
        rows.append((*counts, f"{totals['cost']:.4f} {currency}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    most = _MAX_NAME
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - sum(widths) - len(_GAP) * len(widths)
        most = max(_MIN_NAME, min(_MAX_NAME, room))
    names = [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
    name_width = max(map(len, names))
    for name, row in zip(names, rows, strict=True):
        cells = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        print(_GAP.join((name.ljust(name_width), *cells)))


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


def _clean(name: str) -> str:
    """Return a name without characters that could control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in name) or "-"
