"""The hosted tool `image_generation`: makes and edits images at the endpoint of the settings."""

import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import Struct

from antiphon.config.tools import ImageGenerationSettings
from antiphon.errors import AntiphonError, InvalidRequest, UpstreamError
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.tools import ImageGenerationTool, Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import CloseItem, Delta, OpenItem, ToolUsage
from antiphon.tools.hosted.base import (
    HostedCall,
    HostedContext,
    HostedFunction,
    HostedSession,
    HostedSetup,
    HostedTool,
    HostedUnavailable,
    OpeningCall,
)
from antiphon.tools.hosted.events import make_item_event
from antiphon.tools.hosted.image_generation.endpoint import Image, ImageRefused, ImagesEndpoint, PartialImage
from antiphon.tools.hosted.image_generation.inputs import InputImages, normalize_base64

logger = logging.getLogger(__name__)

TYPES = frozenset({"image_generation"})
NAME = "image_generation"
MAX_PARTIAL_IMAGES = 3
# Fields of the tool that the images API has under the same name. `auto` is its default and is not sent.
_FORWARDED = ("background", "moderation", "output_compression", "output_format", "quality", "size")
_UNSUPPORTED = ("complexity", "frame_count", "frame_duration_ms", "svg")
_DESCRIPTION = "Makes an image from a description. The user sees the image. Do not describe it in the answer."
_EDIT = " The action `edit` changes the latest images of the conversation."
# Some endpoints use other forms than OpenAI: `2K`, `1024*1024`, `16:9`.
_SIZE = re.compile("auto|[1-9][0-9]{0,4}(K|[x*:][1-9][0-9]{0,4})")
_PROMPT: JsonObject = {"type": "string", "description": "A complete description of the image."}


class ImageGenerationHostedTool(HostedTool):
    """Makes images at an OpenAI-compatible endpoint."""

    types = TYPES

    def __init__(self, settings: ImageGenerationSettings) -> None:
        self._settings = settings
        self._endpoint = ImagesEndpoint(settings.base_url, settings.api_key, timeout=settings.timeout)

    async def start(self) -> None:
        self._endpoint.open()

    async def close(self) -> None:
        await self._endpoint.close()

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        assert isinstance(tool, ImageGenerationTool)
        path = context.find_param(tool)
        _check(tool, path)
        images = InputImages(
            context.items,
            tool.input_image_mask,
            project=context.project,
            rules=context.outbound,
            files=context.services.images,
        )
        await images.check_mask(path)
        if tool.action == "edit" and not images.has_any:
            raise _invalid(f"{path}.action", "there is no image in the conversation to edit")
        return ImageGenerationSession(tool, self._settings, self._endpoint, images)


class ImageGenerationSession(HostedSession):
    """An image generation tool during one response."""

    label = NAME

    def __init__(
        self,
        tool: ImageGenerationTool,
        settings: ImageGenerationSettings,
        endpoint: ImagesEndpoint,
        images: InputImages,
    ) -> None:
        self._tool = tool
        self._settings = settings
        self._endpoint = endpoint
        self._images = images

    @property
    def functions(self) -> Sequence[HostedFunction]:  # type: ignore[override]
        """The function. It can edit if there is an image."""
        properties: JsonObject = {"prompt": _PROMPT}
        can_choose = self._tool.action in (None, "auto") and self._images.has_any
        if can_choose:
            properties["action"] = {"type": "string", "enum": ["generate", "edit"]}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": ["prompt"],
            "additionalProperties": False,
        }
        description = _DESCRIPTION + (_EDIT if can_choose else "")
        return [HostedFunction(name=NAME, description=description, parameters=parameters)]

    def begin(self, name: str, key: str) -> HostedCall:
        return ImageGenerationCallRun(self, key)

    async def make_image(self, action: str, prompt: str) -> AsyncGenerator[PartialImage | Image, None]:
        """Yield the partial images and the image of a call."""
        tool = self._tool
        fields: JsonObject = {"model": tool.model or self._settings.model, "prompt": prompt, "n": 1}
        fields |= {name: value for name in _FORWARDED if (value := getattr(tool, name)) not in (None, "auto")}
        if self._settings.stream and tool.partial_images:
            fields |= {"stream": True, "partial_images": tool.partial_images}
        if action == "edit":
            if tool.input_fidelity is not None:
                fields["input_fidelity"] = tool.input_fidelity
            made = self._endpoint.edit(fields, await self._images.load(), await self._images.load_mask())
        else:
            made = self._endpoint.generate(fields)
        async with aclosing(made):
            async for image in made:
                yield image if isinstance(image, PartialImage) else await self._complete(image)

    async def _complete(self, image: Image) -> Image:
        """Return the image with its data. It can be edited from now on."""
        if image.data is None:
            assert image.url is not None
            data = await self._images.fetch_base64(image.url)
        elif (normalized := await normalize_base64(image.data)) is not None:
            data = normalized
        else:
            raise UpstreamError("The images endpoint's image is not valid base64.")
        self._images.add(data, image.settings.get("output_format") or self._tool.output_format or "png")
        return msgspec.structs.replace(image, data=data)

    def choose_action(self, requested: str | None) -> str:
        """Return `generate` or `edit`: as the tool requires, else as the model requests."""
        if self._tool.action in ("generate", "edit"):
            return self._tool.action
        return "edit" if requested == "edit" and self._images.has_any else "generate"


class _Arguments(Struct):
    prompt: str
    action: Literal["generate", "edit"] | None = None


class ImageGenerationCallRun(OpeningCall):
    """One image."""

    def __init__(self, session: ImageGenerationSession, key: str) -> None:
        super().__init__(key)
        self._session = session

    @property
    def is_repeatable(self) -> bool:
        return False  # an image costs money

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        yield self.open()
        try:
            read = read_json(arguments, _Arguments)
        except msgspec.DecodeError as error:
            yield self._close_failed(f"The arguments are invalid: {error}")
            return
        action = self._session.choose_action(read.action)
        try:
            async with aclosing(self._session.make_image(action, read.prompt)) as made:
                async for image in made:
                    if isinstance(image, PartialImage):
                        yield [self._make_partial_event(image)]
                    else:
                        yield self._close_with(image, action)
                        return
        except ImageRefused as refusal:
            yield self._close_failed(refusal.message, refusal.payload)
        except AntiphonError as error:
            logger.warning("an image could not be made: %s", error.message)
            yield self._close_failed(error.message)

    def fail(self, message: str) -> Sequence[Delta]:
        return [*self.open(), *self._close_failed(message)]

    def make_opening(self) -> list[Delta]:
        return [
            OpenItem(self.key, ImageGenerationCall("", "in_progress"), "ig"),
            make_item_event(self.key, "image_generation_call.in_progress"),
            make_item_event(self.key, "image_generation_call.generating"),
        ]

    def _make_partial_event(self, image: PartialImage) -> Delta:
        return make_item_event(
            self.key,
            "image_generation_call.partial_image",
            partial_image_b64=image.data,
            partial_image_index=image.index,
            **image.settings,
        )

    def _close_with(self, image: Image, action: str) -> list[Delta]:
        item = ImageGenerationCall(
            "",
            "completed",
            image.data,
            action=action,
            revised_prompt=image.revised_prompt,
            background=image.settings.get("background"),
            output_format=image.settings.get("output_format"),
            quality=image.settings.get("quality"),
            size=image.settings.get("size"),
        )
        completed = make_item_event(self.key, "image_generation_call.completed")
        return [ToolUsage(images=image.usage or {}), completed, CloseItem(self.key, item)]

    def _close_failed(self, message: str, error: JsonObject | None = None) -> list[Delta]:
        shown = {"type": "image_generation_error", "code": None, "param": None} | (error or {}) | {"message": message}
        return [CloseItem(self.key, ImageGenerationCall("", "failed", error=shown))]


def create(setup: HostedSetup) -> HostedTool:
    """Create the tool. Raises HostedUnavailable without the table `[image_generation]`."""
    settings = setup.settings.image_generation
    if settings is None:
        raise HostedUnavailable(
            TYPES, "No images endpoint is configured: add the table [image_generation] to the settings."
        )
    return ImageGenerationHostedTool(settings)


def _check(tool: ImageGenerationTool, path: str) -> None:
    """Raise InvalidRequest for fields that cannot be served. The endpoint knows which sizes its models make."""
    for name in _UNSUPPORTED:
        if getattr(tool, name) is not None:
            raise _invalid(f"{path}.{name}", "this server does not support it", "unsupported_parameter")
    for name, highest in (("partial_images", MAX_PARTIAL_IMAGES), ("output_compression", 100)):
        value = getattr(tool, name)
        if value is not None and not 0 <= value <= highest:
            code = "integer_above_max_value" if value > highest else "integer_below_min_value"
            raise _invalid(f"{path}.{name}", f"expected a number from 0 to {highest}, got {value}", code)
    if tool.output_format in ("gif", "svg"):
        raise _invalid(f"{path}.output_format", "this server supports png, webp and jpeg")
    if tool.background == "transparent" and tool.output_format == "jpeg":
        raise _invalid(f"{path}.background", "a transparent background needs the output_format png or webp")
    if tool.size is not None and not _SIZE.fullmatch(tool.size):
        raise _invalid(f"{path}.size", f"expected 'auto' or a size such as '1024x1536', got '{tool.size[:40]}'")


def _invalid(param: str, reason: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(f"Invalid '{param}': {reason}.", param=param, code=code)
