"""Request parameters: refuse those that this server or the model does not support, and apply configuration updates."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from antiphon.backends.base import Capabilities
from antiphon.engine.items import check_item_ids
from antiphon.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from antiphon.protocol import validation
from antiphon.protocol.content import InputAudio, InputFile, InputImage, InputVideo
from antiphon.protocol.items import ConfigurationUpdate, CustomToolCallOutput, FunctionCallOutput, Item, Message
from antiphon.protocol.request import (
    ContextManagement,
    CreateRequest,
    Effort,
    Format,
    JsonObjectFormat,
    JsonSchemaFormat,
    ReasoningConfig,
    TextConfig,
)
from antiphon.protocol.unions import Unknown, copy_struct

# Parameters that this server does not implement. Any value but null is refused.
UNIMPLEMENTED = (
    "moderation",
    "image",
    "access_programs",
)
# Parameters of WebSocket messages only. Elsewhere any value but null and the value in `_ALLOWED_VALUES` is refused.
WEBSOCKET_PARAMETERS = ("generate", "stream_id")
_ALLOWED_VALUES: dict[str, object] = {"generate": True}
# Most requests have none of these parameters. One comparison shows it.
_get_special = attrgetter(*UNIMPLEMENTED, *WEBSOCKET_PARAMETERS)
_NOTHING_SPECIAL = (None,) * len(UNIMPLEMENTED + WEBSOCKET_PARAMETERS)

# Part types and the capability that each needs.
_MEDIA: dict[type, str] = {InputImage: "images", InputFile: "files", InputAudio: "audio", InputVideo: "video"}


def check_parameters(
    request: CreateRequest,
    *,
    client_input: str | list[Item | Unknown] | None,
    on_websocket: bool = False,
    may_be_empty: bool = False,
) -> None:
    """Raise if the request is incomplete, contradicts itself, or uses a parameter that this server does not implement.

    `client_input` is the input the client sent; `request.input` also has the items of a prompt template, which are
    already checked. With `may_be_empty` the request needs no input.
    """
    if not request.model:
        raise MissingParameter("Missing required parameter: 'model'.", param="model")
    if request.previous_response_id is not None and request.conversation is not None:
        raise InvalidRequest(
            "'previous_response_id' and 'conversation' exclude each other.",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if request.background and request.store is False:
        raise InvalidRequest("A background response must be stored.", param="background", code="invalid_value")
    if _get_special(request) != _NOTHING_SPECIAL:
        _check_special(request, on_websocket=on_websocket)
    if request.context_management:
        _check_context_management(request.context_management)
    if isinstance(client_input, list):
        check_item_ids(client_input)
    _check_not_empty(request, may_be_empty=may_be_empty)
    text_format = request.text.format if request.text is not None else None
    if isinstance(text_format, JsonSchemaFormat) and text_format.schema is None:
        raise MissingParameter("Missing required parameter: 'text.format.schema'.", param="text.format.schema")


def _check_special(request: CreateRequest, *, on_websocket: bool) -> None:
    for name in UNIMPLEMENTED:
        if getattr(request, name) is not None:
            raise UnsupportedParameter(f"'{name}' is not supported by this server.", param=name)
    for name in () if on_websocket else WEBSOCKET_PARAMETERS:
        if getattr(request, name) not in (None, _ALLOWED_VALUES.get(name)):
            raise UnsupportedParameter(
                f"'{name}' belongs to WebSocket mode: connect to this URL with a WebSocket to use it.", param=name
            )


def _check_not_empty(request: CreateRequest, *, may_be_empty: bool) -> None:
    """Raise if the request has no input, no instructions and no history. The prompt template is already applied."""
    if request.input or may_be_empty or request.instructions:
        return
    if request.previous_response_id is not None or request.conversation is not None:
        return
    if request.input is None:
        raise MissingParameter("Either input or instructions is required.", param="input")
    if request.generate is not False:  # `generate: false` prepares a connection and needs no input
        raise InvalidRequest(
            "'input' is empty, and there are neither instructions nor a previous response or conversation.",
            param="input",
            code="invalid_value",
        )


def _check_context_management(entries: Sequence[ContextManagement]) -> None:
    for index, entry in enumerate(entries):
        if entry.type != "compaction":
            raise UnsupportedParameter(
                f"Context management of type '{entry.type}' is not supported: there is only 'compaction'.",
                param=f"context_management[{index}].type",
            )


# Capabilities of the model


def check_capabilities(request: CreateRequest, capabilities: Capabilities, model: str) -> list[str]:
    """Raise on parameters that the model does not support. Return warnings about parameters without effect."""
    for param, is_used, capability in _REQUIRED_CAPABILITIES:
        if not getattr(capabilities, capability) and is_used(request):
            raise UnsupportedParameter(f"The model '{model}' does not support '{param}'.", param=param)
    warnings: list[str] = []
    if request.reasoning is not None and not capabilities.reasoning:
        # A warning, not an error: some clients send `reasoning` with every request, for any model.
        warnings.append("reasoning: the model does not reason")
    if capabilities.list_ignored is not None and (idle := capabilities.list_ignored(request, model)):
        warnings.append(f"no effect on this model: {', '.join(idle)}")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        warnings.append("stream_options.include_obfuscation: streams are never padded")
    return warnings


def _get_format_type(request: CreateRequest) -> type | None:
    return type(request.text.format) if request.text is not None else None


_REQUIRED_CAPABILITIES: tuple[tuple[str, Callable[[CreateRequest], bool], str], ...] = (
    ("text.format", lambda request: _get_format_type(request) in (JsonSchemaFormat, JsonObjectFormat), "json_schema"),
    ("tools", lambda request: bool(request.tools), "tools"),
    ("top_logprobs", lambda request: bool(request.top_logprobs), "logprobs"),
    ("include", lambda request: "message.output_text.logprobs" in (request.include or ()), "logprobs"),
    ("presence_penalty", lambda request: bool(request.presence_penalty), "penalties"),
    ("frequency_penalty", lambda request: bool(request.frequency_penalty), "penalties"),
)


def check_media(items: Sequence[Item | Unknown], capabilities: Capabilities, model: str) -> None:
    """Raise on images, files, audio or video among the new items that are malformed or that the model cannot read."""
    for index, item in enumerate(items):
        if isinstance(item, Message):
            field, parts = "content", item.content
        elif isinstance(item, (FunctionCallOutput, CustomToolCallOutput)):
            field, parts = "output", item.output
        else:
            continue
        if not isinstance(parts, str):
            for part in parts:
                if type(part) in _MEDIA:
                    _check_media_parts(parts, capabilities, model, f"input[{index}].{field}")
                    break


def _check_media_parts(parts: Sequence[object], capabilities: Capabilities, model: str, path: str) -> None:
    for index, part in enumerate(parts):
        capability = _MEDIA.get(type(part))
        if capability is None:
            continue
        where = f"{path}[{index}]"
        if isinstance(part, InputImage):
            _require_one_field(part, ("image_url", "file_id"), where)
        elif isinstance(part, InputFile):
            _require_one_field(part, ("file_data", "file_url", "file_id"), where)
        # The text of a file is extracted for a model that cannot read files.
        if not getattr(capabilities, capability) and not isinstance(part, InputFile):
            raise UnsupportedParameter(f"The model '{model}' cannot read {capability}.", param=where)


def _require_one_field(part: InputImage | InputFile, names: tuple[str, ...], path: str) -> None:
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) != 1:
        choices = " or ".join(f"'{name}'" for name in names)
        found = "none" if not given else " and ".join(f"'{name}'" for name in given)
        raise InvalidRequest(f"Exactly one of {choices} is required, not {found}.", param=path, code="invalid_value")


# Configuration updates


def check_configuration_updates(items: Sequence[Item | Unknown], *, param: str = "input") -> None:
    """Raise InvalidRequest on a new `configuration_update` item with an invalid value. `param` is the items' path."""
    if ConfigurationUpdate not in map(type, items):  # the common case
        return
    for index, item in enumerate(items):
        if isinstance(item, ConfigurationUpdate):
            _parse_update(item, f"{param}[{index}]")


def apply_configuration_updates(
    request: CreateRequest, items: Sequence[Item | Unknown]
) -> tuple[CreateRequest, list[str]]:
    """Return the request with the updates in `items` applied in order, and warnings about invalid updates.

    `items` is the whole context. Invalid updates in stored items are skipped, because they would fail every
    request that continues them; new items are checked before.
    """
    if ConfigurationUpdate not in map(type, items):
        return request, []
    updates = [item for item in items if isinstance(item, ConfigurationUpdate)]
    request = copy_struct(request)
    warnings: list[str] = []
    for update in updates:
        try:
            effort, text_format = _parse_update(update, "")
        except InvalidRequest as error:
            warnings.append(f"the configuration_update {update.id} was left out: {error.message}")
            continue
        if update.reasoning is not None:
            reasoning = request.reasoning or ReasoningConfig()
            request.reasoning = msgspec.structs.replace(reasoning, effort=effort)
        if text_format is not None:
            request.text = msgspec.structs.replace(request.text or TextConfig(), format=text_format)
    return request, warnings


def _parse_update(update: ConfigurationUpdate, path: str) -> tuple[Effort | None, Format | None]:
    effort = update.reasoning.effort if update.reasoning is not None else None
    given = update.text.format if update.text is not None else None
    text_format = _convert(given, Format | None, _join(path, "text.format"))
    if isinstance(text_format, JsonSchemaFormat) and text_format.schema is None:
        where = _join(path, "text.format.schema")
        raise MissingParameter(f"Missing required parameter: '{where}'.", param=where)
    return _convert(effort, Effort | None, _join(path, "reasoning.effort")), text_format


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _convert(value: Any, kind: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault = validation.explain_error(error, kind, msgspec.json.encode(value))
        where = _join(path, fault.path) if fault.path else path
        raise msgspec.structs.replace(fault, path=where).to_invalid_request() from None
