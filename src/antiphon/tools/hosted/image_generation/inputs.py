"""The images of a conversation that can be edited."""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Sequence

from antiphon.errors import UpstreamError
from antiphon.protocol.content import InputImage
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import Item, Message
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.image_generation.endpoint import ImageFile
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.outbound import fetch

MAX_IMAGES = 16
MAX_IMAGE_BYTES = 50 * 1024 * 1024
MAX_TOTAL_BYTES = 100 * 1024 * 1024
_FETCH_SECONDS = 30.0
_TYPES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})


class InputImages:
    """The latest images of the context: those of the last message with images, or the last one that was made."""

    def __init__(self, items: Iterable[Item | Unknown], mask: JsonObject | None, *, rules: OutboundRules) -> None:
        self._rules = rules
        self._mask = mask
        self._urls: list[str] = []
        for item in items:
            if isinstance(item, Message) and isinstance(item.content, list):
                parts = [part for part in item.content if isinstance(part, InputImage)]
                urls = [part.image_url for part in parts if part.image_url is not None]
                self._urls = urls[-MAX_IMAGES:] or self._urls
            elif isinstance(item, ImageGenerationCall) and item.result:
                self.add(item.result, item.output_format or "png")

    @property
    def has_any(self) -> bool:
        return bool(self._urls)

    def add(self, data: str, output_format: str) -> None:
        """Add an image that was made. It replaces the others."""
        self._urls = [f"data:image/{output_format};base64,{data}"]

    async def load(self) -> Sequence[ImageFile]:
        """Return the images. Raises UpstreamError if one cannot be read."""
        images: list[ImageFile] = []
        left = MAX_TOTAL_BYTES
        for url in self._urls:
            images.append(await self._load(url, max_bytes=min(left, MAX_IMAGE_BYTES)))
            left -= len(images[-1].data)
        return images

    async def load_mask(self) -> ImageFile | None:
        """Return the mask of the tool. Raises UpstreamError if it cannot be read."""
        if self._mask is None:
            return None
        url = self._mask.get("image_url")
        if not isinstance(url, str):
            raise UpstreamError("The mask needs an image_url: masks by file_id are not supported here.")
        return await self._load(url if ":" in url[:8] else f"data:image/png;base64,{url}")

    async def fetch_base64(self, url: str) -> str:
        """Return the image at a URL that the endpoint has named, in base64."""
        return b64encode((await self._load(url)).data).decode("ascii")

    async def _load(self, url: str, *, max_bytes: int = MAX_IMAGE_BYTES) -> ImageFile:
        if url[:5].lower() == "data:":
            head, _, data = url[5:].partition(",")
            try:
                return _check(head.partition(";")[0].lower(), b64decode(data, validate=True))
            except Base64Error:
                raise UpstreamError("An image of the conversation is not valid base64.") from None
        fetched = await fetch(url, rules=self._rules, max_bytes=max(max_bytes, 1), timeout=_FETCH_SECONDS)
        if fetched.status >= 400:
            raise UpstreamError(f"An image could not be fetched: its server answered with status {fetched.status}.")
        return _check(fetched.content_type, fetched.body)


def _check(content_type: str, data: bytes) -> ImageFile:
    if content_type not in _TYPES:
        raise UpstreamError("An image has a type that cannot be edited. It must be PNG, JPEG, WebP or GIF.")
    return ImageFile("image/jpeg" if content_type == "image/jpg" else content_type, data)
