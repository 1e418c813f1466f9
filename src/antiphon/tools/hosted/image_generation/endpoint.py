"""An OpenAI-compatible images endpoint: `/images/generations` and `/images/edits`, streamed or not."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.stream.sse import SseDecoder
from antiphon.upstream.error_mapping import map_error_payload, map_error_response
from antiphon.upstream.http import HttpResponse, HttpSession, read_bounded

MAX_ANSWER_BYTES = 64 * 1024 * 1024
_SETTINGS = ("background", "output_format", "quality", "size")


class PartialImage(Struct, frozen=True, kw_only=True):
    """A preview of an image in base64. `index` counts from 0. `settings` are those that the server reports."""

    data: str
    index: int
    settings: Mapping[str, str] = {}


class Image(Struct, frozen=True, kw_only=True):
    """A finished image: in base64, or at a URL."""

    data: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    settings: Mapping[str, str] = {}
    usage: JsonObject | None = None


class ImageFile(Struct, frozen=True):
    """An image that is sent to be edited, or its mask."""

    content_type: str
    data: bytes


class ImageRefused(UpstreamError):
    """The endpoint refuses to make the image. `payload` is its error object."""

    def __init__(self, message: str, payload: JsonObject) -> None:
        super().__init__(message)
        self.payload = payload


class ImagesEndpoint:
    """Makes images at `base_url`. `timeout` is for one image, in seconds."""

    def __init__(self, base_url: str, api_key: str | None, *, timeout: float) -> None:
        self._timeout = timeout
        self._secrets = frozenset({api_key} if api_key else ())
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = HttpSession(
            base_url, headers=headers, map_error=self._map_error, connect_timeout=min(10.0, timeout)
        )

    def open(self) -> None:
        self._session.open()

    async def close(self) -> None:
        await self._session.close()

    def generate(self, fields: JsonObject) -> AsyncGenerator[PartialImage | Image, None]:
        """Yield the previews of a new image, and then the image. `fields` are those of the images API."""
        body = msgspec.json.encode(fields)
        return self._send("/images/generations", body, "application/json")

    def edit(
        self, fields: JsonObject, images: Sequence[ImageFile], mask: ImageFile | None
    ) -> AsyncGenerator[PartialImage | Image, None]:
        """Yield the previews of an edited image, and then the image."""
        files = [("image[]", image) for image in images] + ([("mask", mask)] if mask is not None else [])
        boundary = secrets.token_hex(16)
        return self._send(
            "/images/edits", _encode_form(fields, files, boundary), f"multipart/form-data; boundary={boundary}"
        )

    async def _send(self, path: str, body: bytes, content_type: str) -> AsyncGenerator[PartialImage | Image, None]:
        deadline = asyncio.get_running_loop().time() + self._timeout
        response = await self._session.send("POST", path, body, {"Content-Type": content_type}, deadline=deadline)
        try:
            if response.content_type == "text/event-stream":
                async for image in self._read_events(response):
                    yield image
            else:
                yield self._read_answer(await read_bounded(response, limit=MAX_ANSWER_BYTES))
        finally:
            response.close()

    async def _read_events(self, response: HttpResponse) -> AsyncGenerator[PartialImage | Image, None]:
        decoder = SseDecoder(limit=MAX_ANSWER_BYTES)
        while True:
            chunk = await response.read()
            for message in decoder.feed(chunk) if chunk else decoder.close():
                payload = self._read_payload(message.data)
                kind = str(payload.get("type") or message.event or "")
                if kind.endswith(".partial_image"):
                    index = payload.get("partial_image_index")
                    yield PartialImage(
                        data=str(payload.get("b64_json") or ""),
                        index=index if isinstance(index, int) else 0,
                        settings=_read_settings(payload),
                    )
                elif kind.endswith(".completed"):
                    yield _make_image(payload, payload)
                    return
            if not chunk:
                raise UpstreamError("The images endpoint ended its answer without an image.")

    def _read_answer(self, data: bytes) -> Image:
        payload = self._read_payload(data)
        entries = payload.get("data")
        if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
            raise UpstreamError("The images endpoint's answer has no image.")
        return _make_image(entries[0], payload)

    def _read_payload(self, data: bytes) -> JsonObject:
        try:
            payload = read_json(data, JsonObject)
        except msgspec.DecodeError:
            raise UpstreamError("The images endpoint's answer is not in the expected format.") from None
        if payload.get("error"):
            raise self._make_error(map_error_payload(payload, secrets=self._secrets).message, payload["error"])
        fields: JsonObject = payload
        return fields

    def _map_error(self, status: int, body: bytes, retry_after: float | None) -> AntiphonError:
        reason = map_error_response(status, body, secrets=self._secrets, retry_after=retry_after).message
        try:
            error = read_json(body, JsonObject).get("error")
        except msgspec.DecodeError:
            error = None
        return self._make_error(f"The images endpoint answered with status {status}: {reason}", error)

    def _make_error(self, message: str, error: Any) -> UpstreamError:
        if isinstance(error, dict) and error.get("code") == "moderation_blocked":
            return ImageRefused(message, {name: error.get(name) for name in ("type", "code", "param")})
        return UpstreamError(message)


def _make_image(entry: JsonObject, answer: JsonObject) -> Image:
    data, url = entry.get("b64_json"), entry.get("url")
    if not isinstance(data, str) and not isinstance(url, str):
        raise UpstreamError("The images endpoint's answer has no image.")
    revised, usage = entry.get("revised_prompt"), answer.get("usage")
    return Image(
        data=data if isinstance(data, str) else None,
        url=url if isinstance(url, str) else None,
        revised_prompt=revised if isinstance(revised, str) else None,
        settings=_read_settings(answer),
        usage=usage if isinstance(usage, dict) else None,
    )


def _read_settings(payload: JsonObject) -> dict[str, str]:
    return {name: payload[name] for name in _SETTINGS if isinstance(payload.get(name), str)}


def _encode_form(fields: JsonObject, files: Sequence[tuple[str, ImageFile]], boundary: str) -> bytes:
    """Encode a form. Names and types are constants or checked, so they contain no line breaks or quotation marks."""
    parts: list[bytes] = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode())
    for index, (name, file) in enumerate(files):
        extension = file.content_type.partition("/")[2]
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{index}.{extension}"\r\n'
            f"Content-Type: {file.content_type}\r\n\r\n"
        )
        parts += (head.encode(), file.data, b"\r\n")
    return b"".join((*parts, f"--{boundary}--\r\n".encode()))
