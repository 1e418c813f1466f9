"""Content parts in the words of Chat Completions: text, and media, which not every role may carry."""

import base64
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec, content
from antiphon.protocol.open import Unknown

ChatPart = dict[str, Any]

_TEXTS = (content.InputText, content.OutputText, content.Text, content.SummaryText, content.ReasoningText)
_MEDIA = (content.InputImage, content.InputFile, content.InputAudio)
_TEXT_FILE = re.compile(r"data:(?:text/[^;,]+|application/json)(?:;charset=[^;,]+)?;base64,", re.IGNORECASE)


class Read(msgspec.Struct):
    """The parts of a message in order, texts as they are and media as Chat Completions has them."""

    parts: list[str | ChatPart]

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def media(self) -> list[ChatPart]:
        return [part for part in self.parts if not isinstance(part, str)]

    def as_user_content(self) -> str | list[ChatPart]:
        """Plain text where that is all: every server takes it."""
        if not self.media:
            return "\n".join(self.texts)
        return [write_text(part) if isinstance(part, str) else part for part in self.parts]


def write_text(text: str) -> ChatPart:
    return {"type": "text", "text": text}


def read_parts(parts: "str | Sequence[content.Part | Unknown]", quirks: Quirks, place: str) -> Read:
    """`place` is where they stand, for errors."""
    if isinstance(parts, str):
        return Read([parts])
    return Read([_read_part(part, quirks, f"{place}[{index}]") for index, part in enumerate(parts)])


def _read_part(part: "content.Part | Unknown", quirks: Quirks, place: str) -> str | ChatPart:
    if isinstance(part, _TEXTS):
        return part.text
    match part:
        case content.Refusal():
            return part.refusal
        case content.InputImage():
            return _read_image(part, place)
        case content.InputFile():
            return _read_file(part, quirks, place)
        case content.InputAudio():
            return {
                "type": "input_audio",
                "input_audio": {"data": part.input_audio.data, "format": part.input_audio.format},
            }
        case _:  # what nobody here knows, the model may
            return codec.encode(part).decode()


def _read_image(part: content.InputImage, place: str) -> ChatPart:
    if part.image_url is None:
        raise _refuse("An image by 'file_id'", "image_url", f"{place}.file_id")
    image = {"url": part.image_url}
    if part.detail is not None:
        image["detail"] = "high" if part.detail == "original" else part.detail
    return {"type": "image_url", "image_url": image}


def _read_file(part: content.InputFile, quirks: Quirks, place: str) -> str | ChatPart:
    name = part.filename or "file"
    if part.file_data is not None:
        text = _read_text_file(part.file_data)
        if text is not None:  # every model can read it so, while few servers take files
            return f"[File: {name}]\n{text}"
        return {"type": "file", "file": {"filename": name, "file_data": part.file_data}}
    if part.file_id is not None:
        if not quirks.file_ids:
            raise _refuse("A file by 'file_id'", "file_data", f"{place}.file_id")
        return {"type": "file", "file": {"file_id": part.file_id}}
    if not quirks.file_urls or part.file_url is None:
        raise _refuse("A file by 'file_url'", "file_data", f"{place}.file_url")
    return {"type": "file", "file": {"filename": name, "file_data": part.file_url}}


def _read_text_file(data: str) -> str | None:
    found = _TEXT_FILE.match(data)
    if found is None:
        return None
    try:
        return base64.b64decode(data[found.end() :], validate=True).decode()
    except ValueError:  # neither base64 nor text
        return None


def _refuse(what: str, instead: str, place: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} cannot be sent to this model's server; use '{instead}'.",
        param=place,
        code="unsupported_parameter",
    )
