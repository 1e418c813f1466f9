"""Content parts as the content blocks of the Messages API."""

import base64
import mimetypes
import re
from collections.abc import Iterable
from typing import Any

from antiphon.errors import InvalidRequest
from antiphon.protocol import codec, content
from antiphon.protocol.open import Unknown

Block = dict[str, Any]
Part = content.Part | Unknown

_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*?;base64,(.*)", re.DOTALL | re.IGNORECASE)
_IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
_TEXTS = {"application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml"}
_TEXT_PARTS = (content.InputText, content.OutputText, content.Text, content.SummaryText, content.ReasoningText)


def write_text(text: str) -> list[Block]:
    """A block of text. The API refuses one with nothing to read in it."""
    return [{"type": "text", "text": text}] if text.strip() else []


def write_json(thing: Any) -> list[Block]:
    """What this API has no block for, as the JSON that it came as."""
    return write_text(codec.encode(thing).decode())


def write_parts(parts: str | Iterable[Part], place: str) -> list[Block]:
    """What a user, or a tool, says. `place` is for the error about a part that cannot be said."""
    if isinstance(parts, str):
        return write_text(parts)
    return [block for index, part in enumerate(parts) for block in write_part(part, f"{place}[{index}]")]


def write_speech(parts: str | Iterable[Part]) -> list[Block]:
    """What the assistant has said: text, and nothing else is allowed."""
    if isinstance(parts, str):
        return write_text(parts)
    said = (_read_text(part) for part in parts)
    return [block for text in said for block in write_text(text)]


def is_text(part: Part) -> bool:
    return isinstance(part, (*_TEXT_PARTS, content.Refusal))


def _read_text(part: Part) -> str:
    if isinstance(part, _TEXT_PARTS):
        return part.text
    if isinstance(part, content.Refusal):
        return part.refusal
    return codec.encode(part).decode()


def write_part(part: Part, place: str) -> list[Block]:
    match part:
        case content.InputImage() | content.ComputerScreenshot():
            blocks = [_write_image(part.image_url, part.file_id, place)]
        case content.InputFile():
            blocks = [_write_file(part, place)]
        case content.InputAudio() | content.InputVideo():
            raise InvalidRequest(f"This model does not take '{part.type}'.", param=place, code="unsupported_content")
        case _:
            blocks = write_text(_read_text(part))
    mark = getattr(part, "prompt_cache_breakpoint", None)
    if mark is not None and blocks:
        blocks[-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h" if mark.ttl == "12h" else "5m"}
    return blocks


def _write_image(url: str | None, file_id: str | None, place: str) -> Block:
    if url is None:
        if file_id is None:
            raise InvalidRequest("An image needs an 'image_url' or a 'file_id'.", param=place, code="invalid_value")
        return {"type": "image", "source": {"type": "file", "file_id": file_id}}
    embedded = _DATA_URL.fullmatch(url)
    if embedded is not None:
        return _write_image_data(embedded[1], embedded[2], f"{place}.image_url")
    if url.startswith(("https://", "http://")):
        return {"type": "image", "source": {"type": "url", "url": url}}
    raise InvalidRequest(
        "An image is a https:// address or a data: address in base64.",
        param=f"{place}.image_url",
        code="invalid_image_url",
    )


def _write_image_data(media_type: str, data: str, place: str) -> Block:
    kind = media_type.lower().replace("image/jpg", "image/jpeg")
    if kind not in _IMAGES:
        raise InvalidRequest(
            f"This model reads images of these types: {', '.join(sorted(_IMAGES))}; not '{media_type}'.",
            param=place,
            code="unsupported_image_media_type",
        )
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _write_file(part: content.InputFile, place: str) -> Block:
    if part.file_data is not None:
        block = _write_file_data(part.file_data, part.filename or "", f"{place}.file_data")
    elif part.file_url is not None:
        block = {"type": "document", "source": {"type": "url", "url": part.file_url}}
    elif part.file_id is not None:
        block = {"type": "document", "source": {"type": "file", "file_id": part.file_id}}
    else:
        raise InvalidRequest(
            "A file needs 'file_data', a 'file_url' or a 'file_id'.", param=place, code="invalid_value"
        )
    if part.filename and block["type"] == "document":
        block["title"] = part.filename
    return block


def _write_file_data(file_data: str, filename: str, place: str) -> Block:
    embedded = _DATA_URL.fullmatch(file_data)
    media_type, data = (embedded[1], embedded[2]) if embedded is not None else ("", file_data)
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # not the right letters, or not as many as there must be
        raise InvalidRequest("The file is not in base64.", param=place, code="invalid_value") from None
    media_type = media_type.lower() or mimetypes.guess_type(filename)[0] or ""
    if media_type == "application/pdf" or raw.startswith(b"%PDF-"):
        return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data}}
    if media_type.startswith("image/"):
        return _write_image_data(media_type, data, place)
    text = _decode_text(raw) if not media_type or media_type.startswith("text/") or media_type in _TEXTS else None
    if text is None:
        named = f" of type '{media_type}'" if media_type else ""
        raise InvalidRequest(
            f"This model reads PDF, text and images, not a file{named}.", param=place, code="unsupported_file"
        )
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}


def _decode_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
