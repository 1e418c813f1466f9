"""Loading of the files and images that a turn names by id or URL, and that the model's server cannot load itself.

Their data replaces the id or URL in the turn. For a model that reads no files, their text is extracted. The stored
items keep the ids and URLs.
"""

import asyncio
import base64
import mimetypes
import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from antiphon.backends.base import Capabilities, Turn
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.engine.prepare.param_paths import rewrite_backend_error
from antiphon.errors import BodyTooLarge, InvalidRequest
from antiphon.protocol.content import ComputerScreenshot, InputFile, InputImage, InputText
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.upstream.media_urls import PART_FIELDS
from antiphon.upstream.outbound import OutboundError, fetch

FETCH_SECONDS = 30.0
_DATA_URL = re.compile(r"data:([\w.+/-]*)(?:;[\w=.-]+)*;base64,", re.IGNORECASE)
_IMAGE_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_REFERENCES = (InputFile, InputImage, ComputerScreenshot)


class _Content(NamedTuple):
    """A file that was loaded."""

    filename: str
    data: bytes


class MediaResolver:
    """Replaces references to files in turns by their contents."""

    def __init__(self, files: FileServiceLoader) -> None:
        self._files = files

    def may_be_needed(self, capabilities: Capabilities) -> bool:
        """Return True if the history of a turn may have a file that has to be replaced."""
        return self._files.is_used or not capabilities.files

    async def resolve(self, turn: Turn, capabilities: Capabilities) -> tuple[Turn, list[str]]:
        """Return the turn with the contents of its files, and warnings about extracted texts.

        Raises InvalidRequest with the param path of a file that cannot be read, and NotFound for an unknown id.
        """
        resolution = _Resolution(self._files, turn, capabilities)
        try:
            items = [await resolution.resolve_item(item, f"input[{index}]") for index, item in enumerate(turn.items)]
        except InvalidRequest as error:
            rewrite_backend_error(error, turn)
            raise
        if all(one is other for one, other in zip(items, turn.items, strict=True)):
            return turn, []
        return msgspec.structs.replace(turn, items=items), resolution.warnings


class _Resolution:
    """The work on one turn. The contents of all its files together are limited."""

    def __init__(self, files: FileServiceLoader, turn: Turn, capabilities: Capabilities) -> None:
        self._files = files
        self._turn = turn
        self._capabilities = capabilities
        self._size = 0
        self.warnings: list[str] = []

    async def resolve_item(self, item: Item | Unknown, path: str) -> Item | Unknown:
        field = PART_FIELDS.get(type(item))
        parts: Any = None if field is None else getattr(item, field)
        if field is None or isinstance(parts, str) or parts is None:
            return item
        if isinstance(parts, ComputerScreenshot):
            part = await self._resolve_part(parts, f"{path}.{field}")
            return item if part is parts else msgspec.structs.replace(item, **{field: part})  # type: ignore[type-var]
        if not isinstance(parts, list) or not any(isinstance(part, _REFERENCES) for part in parts):
            return item
        resolved = [await self._resolve_part(part, f"{path}.{field}[{index}]") for index, part in enumerate(parts)]
        if all(one is other for one, other in zip(resolved, parts, strict=True)):
            return item
        return msgspec.structs.replace(item, **{field: resolved})  # type: ignore[type-var]

    async def _resolve_part(self, part: Any, path: str) -> Any:
        if isinstance(part, InputFile):
            return await self._resolve_file(part, path)
        if isinstance(part, InputImage | ComputerScreenshot) and part.file_id is not None and part.image_url is None:
            return await self._resolve_image(part, path)
        return part

    async def _resolve_image(self, part: InputImage | ComputerScreenshot, path: str) -> Any:
        content = await self._load(part.file_id or "", f"{path}.file_id")
        if content is None:
            return part
        kind = find_image_type(content.data)
        if kind is None:
            raise InvalidRequest(
                f"The file '{part.file_id}' is not an image. Supported are PNG, JPEG, GIF and WebP.",
                param=f"{path}.file_id",
                code="unsupported_image_media_type",
            )
        return msgspec.structs.replace(part, file_id=None, image_url=await _make_data_url(kind, content.data))

    async def _resolve_file(self, part: InputFile, path: str) -> Any:
        if part.file_id is not None:
            where, content = f"{path}.file_id", await self._load(part.file_id, f"{path}.file_id")
        elif part.file_url is not None:
            if self._capabilities.file_urls:
                return part
            where, content = f"{path}.file_url", await self._fetch(part.file_url, f"{path}.file_url")
        elif part.file_data is not None and not self._capabilities.files:
            where, content = f"{path}.file_data", _decode_data(part, f"{path}.file_data")
        else:
            return part
        if content is None:
            return part
        name = part.filename or content.filename
        if not self._capabilities.files:
            text = await self._extract(_Content(name, content.data), where)
            self.warnings.append(f"{path}: the model cannot read files, so it gets the text of '{name}'")
            return InputText(f"[File: {name}]\n{text}")
        return msgspec.structs.replace(
            part,
            file_id=None,
            file_url=None,
            filename=name,
            file_data=await _make_data_url(find_file_type(name, content.data), content.data),
        )

    async def _load(self, file_id: str, path: str) -> _Content | None:
        """Return a stored file. None if there is none and the model's server may know the id."""
        if self._files.is_used:
            found = await self._files.load().load_input(self._turn.project, file_id, param=path, check=self._count)
            if found is not None:
                return _Content(*found)
        if self._capabilities.file_ids:
            return None
        from antiphon.engine.files.files import file_not_found

        raise file_not_found(file_id, param=path)

    async def _fetch(self, url: str, path: str) -> _Content:
        limit = self._files.limits.max_input_bytes - self._size
        try:
            fetched = await fetch(url, rules=self._turn.outbound, max_bytes=max(limit, 1), timeout=FETCH_SECONDS)
        except OutboundError as error:
            raise InvalidRequest(
                f"The file cannot be downloaded: {error.message}", param=path, code="invalid_value"
            ) from None
        if fetched.status != 200:
            raise InvalidRequest(
                f"The file cannot be downloaded: its server answered with status {fetched.status}.",
                param=path,
                code="invalid_value",
            )
        self._count(len(fetched.body), path)
        name = unquote(PurePosixPath(urlsplit(fetched.url).path).name) or "file"
        if "." not in name:
            name += mimetypes.guess_extension(fetched.content_type) or ""
        return _Content(name, fetched.body)

    async def _extract(self, content: _Content, path: str) -> str:
        return await self._files.load().extract_text(content.data, content.filename, param=path)

    def _count(self, size: int, path: str) -> None:
        """Raise BodyTooLarge if the files of the request are too large with another one of this size."""
        limit = self._files.limits.max_input_bytes
        self._size += size
        if self._size > limit:
            raise BodyTooLarge(
                f"The files of the request have more than {limit} bytes (setting files.max_input_bytes).", param=path
            )


def find_image_type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes."""
    for head, kind in _IMAGE_TYPES.items():
        if data.startswith(head):
            return kind
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def find_file_type(filename: str, data: bytes) -> str:
    """Return the media type of a file by its content, else by its name."""
    if data.startswith(b"%PDF"):
        return "application/pdf"
    kind = find_image_type(data) or mimetypes.guess_type(filename)[0]
    if kind is not None and (kind.startswith("text/") or not _is_text(data)):
        return kind
    return "text/plain" if _is_text(data) else "application/octet-stream"


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _decode_data(part: InputFile, path: str) -> _Content:
    data = part.file_data or ""
    found = _DATA_URL.match(data)
    try:
        raw = base64.b64decode(data[found.end() :] if found else data, validate=True)
    except ValueError:
        raise InvalidRequest("The file is not valid base64.", param=path, code="invalid_value") from None
    name = part.filename or f"file{mimetypes.guess_extension(found[1]) or '' if found else ''}"
    return _Content(name, raw)


async def _make_data_url(kind: str, data: bytes) -> str:
    encoded = await asyncio.to_thread(base64.b64encode, data)
    return f"data:{kind};base64,{encoded.decode()}"
