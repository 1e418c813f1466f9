"""What another server says of an error, whichever of the usual shapes it says it in."""

import html
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from antiphon.protocol.json_text import read_json

LONGEST_MESSAGE = 2000

# The patterns below take a time that grows with the square of a page that was made for that.
_LONGEST_PAGE = 8000

_CODE = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_UNSEEN = re.compile(r"<(script|style|head)\b.*?</\1>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """An error in another server's words. `message` is empty if it had none."""

    message: str = ""
    type: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None


def read_body(body: bytes) -> Report:
    """The error in the body of an answer: JSON, HTML or plain text."""
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Report(message=_read_text(body.decode(errors="ignore")))
    return read_payload(payload)


def decode_any(data: bytes) -> Any:
    """What stands where an error was told: JSON, else the text as it is."""
    try:
        return read_json(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace")


def read_payload(payload: Any) -> Report:
    """The error in decoded JSON."""
    if isinstance(payload, list) and payload:  # Gemini wraps the object in an array
        payload = payload[0]
    if not isinstance(payload, Mapping):
        return Report(message=_shorten(payload) if isinstance(payload, str) else "")
    error = payload.get("error")
    if isinstance(error, Mapping):
        return _read_error(error)
    if isinstance(error, str) and error:
        return _read_error({"message": error, "type": payload.get("error_type"), "code": payload.get("code")})
    if payload.get("detail"):
        return _read_detail(payload["detail"])
    return _read_error(payload)


def is_error(payload: Any) -> bool:
    """Whether a JSON answer with a good status is an error nevertheless."""
    if isinstance(payload, list) and len(payload) == 1:
        payload = payload[0]
    if not isinstance(payload, Mapping):
        return False
    if payload.get("object") == "error" or payload.get("type") == "error":
        return True
    # A failed response of the Responses API has its error beside what it is the error of.
    return bool(payload.get("error")) and not ({"output", "choices", "content"} & payload.keys())


def _read_error(error: Mapping[str, Any]) -> Report:
    code = error.get("code")
    status = code if isinstance(code, int) else error.get("status_code")
    param = error.get("param")
    return Report(
        message=_shorten(_find_message(error)),
        type=_take_code(error.get("type")) or _take_code(error.get("status")).lower(),
        code=_take_code(code),
        param=_shorten(param)[:200] if isinstance(param, str) and param else None,
        status=status if isinstance(status, int) and 400 <= status < 600 else None,
    )


def _find_message(error: Mapping[str, Any]) -> str:
    metadata = error.get("metadata")
    # OpenRouter says "Provider returned error", and what the provider said beside it.
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    if isinstance(raw, str) and raw:
        return read_body(raw.encode(errors="replace")).message or raw
    for name in ("message", "msg", "detail", "error_description"):
        text = error.get(name)
        if isinstance(text, str) and text:
            return text
        if isinstance(text, list | Mapping) and text:
            return _read_detail(text).message
    return ""


def _read_detail(detail: Any) -> Report:
    """FastAPI's: a text, an object, or a list of what is wrong where."""
    if isinstance(detail, Mapping):
        return read_payload(detail)
    if not isinstance(detail, list):
        return Report(message=_shorten(str(detail)))
    faults = [fault for fault in detail if isinstance(fault, Mapping)]
    texts = [f"{_join(fault.get('loc'))}: {fault.get('msg', 'invalid')}" for fault in faults]
    return Report(
        message=_shorten("; ".join(texts)), param=_join(faults[0].get("loc")) if faults and "loc" in faults[0] else None
    )


def _join(place: Any) -> str:
    return ".".join(str(step) for step in place if step != "body") if isinstance(place, list) else str(place or "body")


def _read_text(text: str) -> str:
    text = text[:_LONGEST_PAGE]
    if "<" in text and (title := _TITLE.search(text)) and title[1].strip():
        text = title[1]
    elif "<html" in text.lower():
        text = _UNSEEN.sub(" ", text)
    return _shorten(html.unescape(text))


def _shorten(text: str) -> str:
    """On one line, without control characters, and of a length that can be shown."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * LONGEST_MESSAGE]).split())
    return words if len(words) <= LONGEST_MESSAGE else f"{words[:LONGEST_MESSAGE]}…"


def _take_code(value: Any) -> str:
    """A code or type as it is, if it is one: not a sentence, and not a number."""
    return value if isinstance(value, str) and _CODE.fullmatch(value) and not value.isdigit() else ""
