"""How long a server asks to wait."""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime


def read_retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """The seconds that the answer's headers ask to wait, if they do: a number, or a date. `now` is since the epoch."""
    milliseconds = _read_number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _read_number(text)
    if seconds is not None or not text:
        return seconds
    try:
        return max(parsedate_to_datetime(text).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None


def _read_number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
