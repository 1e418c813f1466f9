"""Forms with a file (multipart/form-data). The file is written to disk while it arrives, never held in memory."""

import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from antiphon.errors import BodyTooLarge, InvalidRequest, MissingParameter
from antiphon.server.http import HttpRequest
from antiphon.server.request_body import read_declared_length, read_message
from antiphon.store.files.content import ContentWriter

_MAX_HEADER_BYTES = 16 * 1024
_MAX_FIELD_BYTES = 64 * 1024
_MAX_PARTS = 100
# The part of a form that is not the file.
_OVERHEAD_BYTES = 1024 * 1024
_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,200})"|([^;\s"]{1,200}))""", re.IGNORECASE)
_PARAMETER = re.compile(r""";\s*([\w-]+\*?)\s*=\s*(?:"((?:\\.|[^"\\])*)"|([^;\s]*))""")
_ESCAPE = re.compile(r"\\(.)")
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")

Event = tuple[Literal["part"], dict[str, str]] | tuple[Literal["data"], bytes] | tuple[Literal["end"], None]


class MultipartReader:
    """Splits the body of a form. `feed` takes the next bytes, and `is_complete` is true after the last boundary."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first boundary has no line break before it.
        self._buffer = bytearray(b"\r\n")
        self._state: Literal["preamble", "boundary", "headers", "data"] = "preamble"
        self._parts = 0
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the beginnings, the data and the ends of parts. Raises InvalidRequest if the form is malformed."""
        if self.is_complete:
            return
        self._buffer += data
        while not self.is_complete:
            if self._state in ("preamble", "data"):
                found = self._buffer.find(self._delimiter)
                end = found if found >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
                if self._state == "data" and end:
                    yield "data", bytes(memoryview(self._buffer)[:end])
                del self._buffer[:end]
                if found < 0:
                    return
                if self._state == "data":
                    yield "end", None
                del self._buffer[: len(self._delimiter)]
                self._state = "boundary"
            elif self._state == "boundary":
                if not self._read_boundary():
                    return
            else:
                headers = self._read_headers()
                if headers is None:
                    return
                self._state = "data"
                yield "part", headers

    def _read_boundary(self) -> bool:
        """Read the rest of the line of a boundary. Return False if it has not arrived."""
        if self._buffer.startswith(b"--"):
            self.is_complete = True
            return True
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEADER_BYTES:
                raise _malformed("a boundary has no end")
            return False
        if self._buffer[:end].strip(b" \t"):
            raise _malformed("text follows a boundary")
        del self._buffer[: end + 2]
        self._state = "headers"
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _malformed(f"it has more than {_MAX_PARTS} parts")
        return True

    def _read_headers(self) -> dict[str, str] | None:
        """Return the headers of a part. None if they have not arrived completely."""
        if self._buffer.startswith(b"\r\n"):
            head, length = b"", 2
        else:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0 or end > _MAX_HEADER_BYTES:
                if len(self._buffer) > _MAX_HEADER_BYTES:
                    raise _malformed("the headers of a part are too long")
                return None
            head, length = bytes(self._buffer[:end]), end + 4
        del self._buffer[:length]
        headers: dict[str, str] = {}
        for line in head.decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return headers


class Form(NamedTuple):
    """A form that was read. `writer` has the content of the file, which the caller commits or discards."""

    fields: dict[str, str]
    filename: str
    writer: ContentWriter


async def read_form(
    http_request: HttpRequest,
    *,
    file_field: str,
    start_writing: Callable[[], Awaitable[ContentWriter]],
    max_bytes: int,
    setting: str,
) -> Form:
    """Read a form with a file.

    Raises BodyTooLarge if the file exceeds `max_bytes`, and InvalidRequest if the body is not a form.
    """
    reader = MultipartReader(_read_head(http_request.headers, max_bytes, setting))
    form = _FormBuilder(file_field, start_writing, max_bytes, setting)
    try:
        more, received = True, 0
        while more:
            data, more = read_message(await http_request.receive())
            received += len(data)
            for event in reader.feed(data):  # text after the last boundary has no meaning
                await form.add(*event)
            if received - form.file_size > _OVERHEAD_BYTES:
                raise _malformed(f"it has more than {_OVERHEAD_BYTES} bytes besides the file")
        if not reader.is_complete:
            raise _malformed("it ends before the last boundary")
        if form.writer is None:
            raise MissingParameter(f"Missing required parameter: '{file_field}'.", param=file_field)
        return Form(form.fields, form.filename, form.writer)
    except BaseException:
        if form.writer is not None:
            form.writer.discard()
        raise


class _FormBuilder:
    """Collects the parts of a form."""

    def __init__(
        self, file_field: str, start_writing: Callable[[], Awaitable[ContentWriter]], max_bytes: int, setting: str
    ) -> None:
        self._file_field = file_field
        self._start_writing = start_writing
        self._max_bytes = max_bytes
        self._setting = setting
        self._name = ""
        self._value = bytearray()
        self._is_file = False
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.writer: ContentWriter | None = None

    @property
    def file_size(self) -> int:
        return 0 if self.writer is None else self.writer.size

    async def add(self, kind: str, value: Any) -> None:
        if kind == "part":
            await self._begin(value)
        elif kind == "end":
            if not self._is_file:
                self.fields[self._name] = self._value.decode("utf-8", "replace")
        elif self._is_file:
            assert self.writer is not None
            if self.writer.size + len(value) > self._max_bytes:
                raise _too_large(self._max_bytes, self._setting, self._file_field)
            await self.writer.write(value)
        else:
            self._value += value
            if len(self._value) > _MAX_FIELD_BYTES:
                raise InvalidRequest(
                    f"The field '{self._name[:100]}' is too long.",
                    param=self._name[:100],
                    code="string_above_max_length",
                )

    async def _begin(self, headers: dict[str, str]) -> None:
        parameters = _parse_disposition(headers.get("content-disposition", ""))
        name = parameters.get("name")
        if name is None:
            raise _malformed("a part has no name")
        self._name, self._value = name, bytearray()
        self._is_file = name == self._file_field
        if self._is_file:
            if self.writer is not None:
                raise InvalidRequest(f"'{name}' is given twice: send one file.", param=name, code="invalid_value")
            self.filename = parameters.get("filename", "")
            self.writer = await self._start_writing()


def nest_fields(fields: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a form with names such as `expires_after[seconds]` as nested objects."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        found = _FIELD.fullmatch(name)
        if found is None:
            nested[name] = value
            continue
        keys = [found[1], *(key.rstrip("]") for key in found[2].split("[")[1:])]
        level = nested
        for key in keys[:-1]:
            inner = level.setdefault(key, {})
            if not isinstance(inner, dict):
                raise InvalidRequest(f"'{key}' is given in two forms.", param=key, code="invalid_value")
            level = inner
        level[keys[-1]] = value
    return nested


def _read_head(headers: dict[bytes, bytes], max_bytes: int, setting: str) -> bytes:
    """Return the boundary.

    Raises InvalidRequest if the body is not a form, and BodyTooLarge if its declared length is too large.
    """
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    boundary = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or boundary is None:
        raise InvalidRequest(
            "The body must be a form: send 'Content-Type: multipart/form-data' with a boundary.",
            code="invalid_content_type",
        )
    if read_declared_length(headers) > max_bytes + _OVERHEAD_BYTES:
        raise _too_large(max_bytes, setting, None)
    return (boundary[1] or boundary[2]).encode("latin-1")


def _parse_disposition(value: str) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for name, quoted, plain in _PARAMETER.findall(value):
        if name.endswith("*"):  # filename*=UTF-8''name
            parameters[name[:-1].lower()] = unquote(plain.rpartition("'")[2])
        else:
            text = _ESCAPE.sub(r"\1", quoted) if quoted else plain
            # Browsers and httpx encode these characters in quoted strings so.
            text = text.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
            parameters.setdefault(name.lower(), text)
    return parameters


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The form is malformed: {reason}.", code="invalid_form")


def _too_large(limit: int, setting: str, param: str | None) -> BodyTooLarge:
    return BodyTooLarge(
        f"The file is too large: this server accepts at most {limit} bytes (setting {setting}).", param=param
    )
