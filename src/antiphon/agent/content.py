"""Images and files in the task of a run, and in results of tools, as content parts of the Responses API."""

import base64
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from antiphon.errors import InvalidRequest
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import ContentPart

Detail = Literal["auto", "low", "high"]

# The first bytes of the image formats that models read, each with its media type.
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


class ImageInput(ContentPart, frozen=True, kw_only=True):
    """An image for the model. Use one of the class methods to make it."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Detail = "auto"

    def __post_init__(self) -> None:
        if (self.image_url is None) is (self.file_id is None):
            raise InvalidRequest("An image has either an 'image_url' or a 'file_id'.", param="image_url")
        if self.detail not in get_args(Detail):
            raise InvalidRequest(f"detail: {self.detail!r} is not one of auto, low, high.", param="detail")

    @classmethod
    def from_path(cls, path: str | Path, *, detail: Detail = "auto") -> "ImageInput":
        """Read an image file: PNG, JPEG, GIF or WebP. Raises OSError if it cannot be read."""
        return cls.from_bytes(Path(path).read_bytes(), detail=detail)

    @classmethod
    def from_bytes(cls, data: bytes, *, media_type: str | None = None, detail: Detail = "auto") -> "ImageInput":
        """Make an image of the contents of a file. The media type is that of the contents if it is not given."""
        return cls(image_url=_make_data_url(data, media_type or _find_image_type(data)), detail=detail)

    @classmethod
    def from_url(cls, url: str, *, detail: Detail = "auto") -> "ImageInput":
        """Make an image of an address that the server can read."""
        return cls(image_url=_require_url(url), detail=detail)

    @classmethod
    def from_id(cls, file_id: str, *, detail: Detail = "auto") -> "ImageInput":
        """Make an image of a file that was uploaded to the server."""
        return cls(file_id=file_id, detail=detail)

    def to_part(self) -> JsonObject:
        source = {"image_url": self.image_url} if self.file_id is None else {"file_id": self.file_id}
        return {"type": "input_image", **source, "detail": self.detail}


class FileInput(ContentPart, frozen=True, kw_only=True):
    """A file for the model, for example a PDF document. Use one of the class methods to make it."""

    file_data: str | None = None
    filename: str | None = None
    file_url: str | None = None
    file_id: str | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.file_data, self.file_url, self.file_id)) != 1:
            raise InvalidRequest("A file has one of 'file_data', 'file_url' and 'file_id'.", param="file_data")
        if self.file_data is not None and not self.filename:
            raise InvalidRequest("A file with 'file_data' needs a 'filename'.", param="filename")

    @classmethod
    def from_path(cls, path: str | Path) -> "FileInput":
        """Read a file. Raises OSError if it cannot be read."""
        return cls.from_bytes(Path(path).read_bytes(), filename=Path(path).name)

    @classmethod
    def from_bytes(cls, data: bytes, *, filename: str, media_type: str | None = None) -> "FileInput":
        """Make a file of its contents. The media type is that of the file name if it is not given."""
        guessed = media_type or mimetypes.guess_type(filename)[0] or "application/octet-stream"
        return cls(file_data=_make_data_url(data, guessed), filename=filename)

    @classmethod
    def from_url(cls, url: str) -> "FileInput":
        """Make a file of an address that the server can read."""
        return cls(file_url=_require_url(url))

    @classmethod
    def from_id(cls, file_id: str) -> "FileInput":
        """Make a file that was uploaded to the server."""
        return cls(file_id=file_id)

    def to_part(self) -> JsonObject:
        fields = {"filename": self.filename, "file_data": self.file_data, "file_url": self.file_url}
        fields["file_id"] = self.file_id
        return {"type": "input_file", **{name: value for name, value in fields.items() if value is not None}}


ContentInput: TypeAlias = str | ImageInput | FileInput


def user_message(*content: ContentInput) -> JsonObject:
    """Return an item with a message of the user: texts, images and files in order."""
    if not content:
        raise InvalidRequest("A message needs content.", param="content")
    return {"role": "user", "content": [_make_part(each, index) for index, each in enumerate(content)]}


def is_content(value: object) -> bool:
    """Return True for a text, an image or a file; False for an item."""
    return isinstance(value, str | ImageInput | FileInput)


def _make_part(content: Any, index: int) -> JsonObject:
    if isinstance(content, str):
        return {"type": "input_text", "text": str.__str__(content)}
    if isinstance(content, ImageInput | FileInput):
        return content.to_part()
    if isinstance(content, Mapping) and str(content.get("type")).startswith("input_"):
        return dict(content)
    raise InvalidRequest(
        f"content[{index}]: expected a string, ImageInput or FileInput, got {type(content).__name__}.",
        param=f"content[{index}]",
    )


def _make_data_url(data: bytes, media_type: str) -> str:
    if not data:
        raise InvalidRequest("The contents are empty.", param="data")
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _find_image_type(data: bytes) -> str:
    for signature, media_type in _SIGNATURES:
        if data.startswith(signature):
            return media_type
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    raise InvalidRequest(
        "The contents are no PNG, JPEG, GIF or WebP image. For another format, pass 'media_type'.", param="data"
    )


def _require_url(url: str) -> str:
    if not url.startswith(("http://", "https://", "data:")):
        raise InvalidRequest(f"{url!r} must begin with http://, https:// or data:.", param="url")
    return url
