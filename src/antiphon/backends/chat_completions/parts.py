"""Translation of content parts to those of Chat Completions messages."""

import base64
import mimetypes
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol import codec, content
from antiphon.protocol.unions import Unknown

ChatPart = dict[str, Any]

TEXT_TYPES = (content.InputText, content.OutputText, content.Text, content.SummaryText, content.ReasoningText)
_TEXT_FILE = re.compile(r"data:(?:text/[^;,]+|application/json)(?:;charset=[^;,]+)?;base64,", re.IGNORECASE)


class Content(msgspec.Struct):
    """The parts of a message in order: texts as strings, media as Chat Completions parts."""

    parts: list[str | ChatPart]

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def media(self) -> list[ChatPart]:
        return [part for part in self.parts if not isinstance(part, str)]

    def as_user_content(self) -> str | list[ChatPart]:
        """Return a string if there is only text: every server accepts it."""
        if not self.media:
            return "\n".join(self.texts)
        return [make_text_part(part) if isinstance(part, str) else part for part in self.parts]


def make_text_part(text: str) -> ChatPart:
    return {"type": "text", "text": text}


def parse_parts(parts: "str | Sequence[content.Part | Unknown]", quirks: Quirks, path: str) -> Content:
    """Parse content parts. `path` is their param path, for errors."""
    if isinstance(parts, str):
        return Content([parts])
    return Content([_parse_part(part, quirks, f"{path}[{index}]") for index, part in enumerate(parts)])


def find_plain_text(parts: "str | Sequence[content.Part | Unknown]") -> str | None:
    """Return the text of content that is only text in one part, else None."""
    if type(parts) is str:
        return parts
    if len(parts) == 1 and type(part := parts[0]) in TEXT_TYPES:
        text: str = part.text  # type: ignore[union-attr]
        return text
    return None


def _parse_part(part: "content.Part | Unknown", quirks: Quirks, path: str) -> str | ChatPart:
    if isinstance(part, TEXT_TYPES):
        return part.text
    match part:
        case content.Refusal():
            return part.refusal
        case content.InputImage():
            return _parse_image(part, path)
        case content.InputFile():
            return _parse_file(part, quirks, path)
        case content.InputAudio():
            return {
                "type": "input_audio",
                "input_audio": {"data": part.input_audio.data, "format": part.input_audio.format},
            }
        case _:  # unknown parts are sent as JSON
            return codec.encode(part).decode()


def _parse_image(part: content.InputImage, path: str) -> ChatPart:
    if part.image_url is None:
        raise _make_unknown_file_error(part.file_id, f"{path}.file_id")
    image = {"url": part.image_url}
    if part.detail is not None:
        image["detail"] = "high" if part.detail == "original" else part.detail
    return {"type": "image_url", "image_url": image}


def _parse_file(part: content.InputFile, quirks: Quirks, path: str) -> str | ChatPart:
    name = part.filename or "file"
    if part.file_data is not None:
        data = part.file_data
        if data[:5].lower() != "data:":
            data = _make_data_url(data, name, f"{path}.file_data")
        text = _decode_text_file(data)
        if text is not None:  # every model reads text, but few servers accept files
            return f"[File: {name}]\n{text}"
        return {"type": "file", "file": {"filename": name, "file_data": data}}
    if part.file_id is not None:
        if not quirks.file_ids:
            raise _make_unknown_file_error(part.file_id, f"{path}.file_id")
        return {"type": "file", "file": {"file_id": part.file_id}}
    if not quirks.file_urls or part.file_url is None:
        raise _make_unsupported_error("A file by 'file_url'", "file_data", f"{path}.file_url")
    return {"type": "file", "file": {"filename": name, "file_data": part.file_url}}


def _make_data_url(data: str, name: str, path: str) -> str:
    """Return base64 as a data URL, which servers expect. Raises InvalidRequest if it is not base64."""
    data = "".join(data.split())  # many encoders write lines
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidRequest(f"'{path}' is not valid base64.", param=path, code="invalid_value") from None
    kind = "application/pdf" if raw.startswith(b"%PDF") else mimetypes.guess_type(name)[0]
    return f"data:{kind or 'application/octet-stream'};base64,{data}"


def _decode_text_file(data: str) -> str | None:
    found = _TEXT_FILE.match(data)
    if found is None:
        return None
    try:
        return base64.b64decode(data[found.end() :], validate=True).decode()
    except ValueError:  # neither base64 nor text
        return None


def _make_unknown_file_error(file_id: str | None, path: str) -> NotFound:
    """Return the error of a file that neither this server nor the model's server has."""
    error = NotFound(f"No such File object: {file_id}", param=path)
    error.code = None  # as in the API
    return error


def _make_unsupported_error(subject: str, alternative: str, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{subject} is not supported by this model's server; use '{alternative}'.",
        param=path,
        code="unsupported_parameter",
    )
