"""The images of a conversation that can be edited."""

import asyncio
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from antiphon.errors import InvalidRequest, UpstreamError
from antiphon.protocol.content import InputImage
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import Item, Message
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.base import StoredImageService
from antiphon.tools.hosted.image_generation.endpoint import ImageFile
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.outbound import fetch

MAX_IMAGES = 16
MAX_IMAGE_BYTES = 50 * 1024 * 1024
MAX_TOTAL_BYTES = 100 * 1024 * 1024
_FETCH_SECONDS = 30.0
_TYPES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})


Files = StoredImageService | None


class _StoredFile(NamedTuple):
    id: str


class InputImages:
    """The latest images of the context: those of the last message with images, or the last generated one."""

    def __init__(
        self,
        items: Iterable[Item | Unknown],
        mask: JsonObject | None,
        *,
        project: str,
        rules: OutboundRules,
        files: Files,
    ) -> None:
        self._project = project
        self._rules = rules
        self._files = files
        self._mask = mask
        self._images: list[str | _StoredFile] = []
        for item in items:
            if isinstance(item, Message) and isinstance(item.content, list):
                parts = [part for part in item.content if isinstance(part, InputImage)]
                images = [found for part in parts if (found := _find_image(part, files)) is not None]
                self._images = images[-MAX_IMAGES:] or self._images
            elif isinstance(item, ImageGenerationCall) and item.result:
                self.add(item.result, item.output_format or "png")

    @property
    def has_any(self) -> bool:
        return bool(self._images)

    def add(self, data: str, output_format: str) -> None:
        """Add an image that was made. It replaces the others."""
        self._images = [f"data:image/{output_format};base64,{data}"]

    async def load(self) -> Sequence[ImageFile]:
        """Return the images. Raises UpstreamError if one cannot be read."""
        images: list[ImageFile] = []
        left = MAX_TOTAL_BYTES
        for image in self._images:
            images.append(await self._load(image, max_bytes=min(left, MAX_IMAGE_BYTES)))
            left -= len(images[-1].data)
        return images

    async def load_mask(self) -> ImageFile | None:
        """Return the mask of the tool. Raises UpstreamError if it cannot be read."""
        if self._mask is None:
            return None
        url, file_id = self._mask.get("image_url"), self._mask.get("file_id")
        if not isinstance(url, str):
            return await self._load(_StoredFile(str(file_id)))
        return await self._load(_complete_url(url))

    async def fetch_base64(self, url: str) -> str:
        """Return the image at a URL that the endpoint has named, in base64."""
        return b64encode((await self._load(url)).data).decode("ascii")

    async def check_mask(self, path: str) -> None:
        """Raise an error with the param path unless the mask is a URL or a stored file."""
        if self._mask is None:
            return
        url = self._mask.get("image_url")
        if isinstance(url, str):
            url = _complete_url(url)
            if url[:5].lower() == "data:" and await normalize_base64(url) is None:
                where = f"{path}.input_image_mask.image_url"
                raise InvalidRequest(f"'{where}' is not valid base64.", param=where, code="invalid_value")
            return
        param, file_id = f"{path}.input_image_mask.file_id", self._mask.get("file_id")
        if not isinstance(file_id, str):
            raise InvalidRequest(
                f"'{path}.input_image_mask' needs an 'image_url' or a 'file_id'.",
                param=f"{path}.input_image_mask",
                code="missing_required_parameter",
            )
        if self._files is None:
            raise InvalidRequest(f"'{param}': this server has no files.", param=param, code="invalid_value")
        await self._files.check_file(self._project, file_id, param=param)

    async def _load(self, url: "str | _StoredFile", *, max_bytes: int = MAX_IMAGE_BYTES) -> ImageFile:
        if isinstance(url, _StoredFile):
            assert self._files is not None
            try:
                return _check(*await self._files.load_image(self._project, url.id, max_bytes=max_bytes))
            except InvalidRequest as error:  # also NotFound: it was deleted meanwhile
                raise UpstreamError(error.message) from None
        if url[:5].lower() == "data:":
            head, _, data = url[5:].partition(",")
            try:
                return _check(head.partition(";")[0].lower(), b64decode("".join(data.split()), validate=True))
            except Base64Error:
                raise UpstreamError("An image of the conversation is not valid base64.") from None
        fetched = await fetch(url, rules=self._rules, max_bytes=max(max_bytes, 1), timeout=_FETCH_SECONDS)
        if fetched.status >= 400:
            raise UpstreamError(f"An image could not be fetched: its server answered with status {fetched.status}.")
        return _check(fetched.content_type, fetched.body)


async def normalize_base64(data: str) -> str | None:
    """Return base64 without line breaks and the head of a data URL, or None if it is not the base64 of any data."""
    return await asyncio.to_thread(_normalize, data)


def _normalize(data: str) -> str | None:
    if data[:5].lower() == "data:":
        data = data.partition(",")[2]
    data = "".join(data.split())
    try:
        return data if b64decode(data, validate=True) else None
    except ValueError:
        return None


def _complete_url(url: str) -> str:
    """Return the URL of a mask. A text without a scheme is base64."""
    return url if ":" in url[:8] else f"data:image/png;base64,{url}"


def _find_image(part: InputImage, files: Files) -> "str | _StoredFile | None":
    if part.image_url is not None:
        return part.image_url
    return None if part.file_id is None or files is None else _StoredFile(part.file_id)


def _check(content_type: str, data: bytes) -> ImageFile:
    if content_type not in _TYPES:
        raise UpstreamError("An image has a type that cannot be edited. It must be PNG, JPEG, WebP or GIF.")
    return ImageFile("image/jpeg" if content_type == "image/jpg" else content_type, data)
