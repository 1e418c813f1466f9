"""Which parameters a turn may use: what nobody here can do is refused by name, before the model is asked."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import msgspec

from antiphon.backends.base import Capabilities
from antiphon.engine.items import check_named
from antiphon.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from antiphon.protocol import validation
from antiphon.protocol.items import ConfigurationUpdate, Item
from antiphon.protocol.request import (
    CreateRequest,
    Effort,
    Format,
    JsonObjectFormat,
    JsonSchemaFormat,
    ReasoningConfig,
    TextConfig,
)
from antiphon.protocol.unions import Unknown

# Parameters this server does not implement: any value but null (or what `_harmless` lists) is refused.
UNIMPLEMENTED = (
    "moderation",
    "image",
    "access_programs",
)
# What only the messages of a WebSocket may have.
OF_WEBSOCKETS = ("generate", "stream_id")
_harmless: dict[str, object] = {"generate": True}


def check_parameters(
    request: CreateRequest,
    *,
    own: str | list[Item | Unknown] | None,
    on_websocket: bool = False,
    may_be_empty: bool = False,
) -> None:
    """Raise if the request is incomplete, contradicts itself, or asks for what this server does not implement.

    `own` is the input that the client has sent; that of a prompt's template has been put before it, and is checked.
    A request that `may_be_empty` need not have anything that a model could answer.
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
    for name in UNIMPLEMENTED:
        if _is_set(request, name):
            raise UnsupportedParameter(f"'{name}' is not supported by this server.", param=name)
    for name in () if on_websocket else OF_WEBSOCKETS:
        if _is_set(request, name):
            raise UnsupportedParameter(
                f"'{name}' belongs to WebSocket mode: connect to this URL with a WebSocket to use it.", param=name
            )
    _check_context_management(request)
    if isinstance(own, list):
        check_named(own)
    _check_input(request, may_be_empty=may_be_empty)
    text_format = request.text.format if request.text is not None else None
    if isinstance(text_format, JsonSchemaFormat) and text_format.schema is None:
        raise MissingParameter("Missing required parameter: 'text.format.schema'.", param="text.format.schema")


def _check_input(request: CreateRequest, *, may_be_empty: bool) -> None:
    """Raise if there is nothing to answer, neither here nor in what is continued. A prompt is filled in by now."""
    if request.input or may_be_empty or request.instructions:
        return
    if request.previous_response_id is not None or request.conversation is not None:
        return
    if request.input is None:
        raise MissingParameter("Either input or instructions is required.", param="input")
    if request.generate is not False:  # a connection can be made ready before there is anything to say
        raise InvalidRequest(
            "'input' is empty, and there is nothing else to answer: neither instructions nor anything to continue.",
            param="input",
            code="invalid_value",
        )


def _check_context_management(request: CreateRequest) -> None:
    for index, entry in enumerate(request.context_management or ()):
        if entry.type != "compaction":
            raise UnsupportedParameter(
                f"Context management of type '{entry.type}' is not supported: there is only 'compaction'.",
                param=f"context_management[{index}].type",
            )


def _is_set(request: CreateRequest, name: str) -> bool:
    value = getattr(request, name)
    return value is not None and value != _harmless.get(name)


def check_capabilities(request: CreateRequest, capabilities: Capabilities, model: str) -> list[str]:
    """Raise on what this model's backend cannot do. Returns warnings for hints that have no effect on it."""
    for param, asked, capability in _DEMANDS:
        if not getattr(capabilities, capability) and asked(request):
            raise UnsupportedParameter(f"The model '{model}' does not support '{param}'.", param=param)
    warnings: list[str] = []
    if request.reasoning is not None and not capabilities.reasoning:
        # Some clients send `reasoning` with every request, whatever the model: it must not stop them.
        warnings.append("reasoning: the model does not reason")
    if capabilities.list_idle is not None and (idle := capabilities.list_idle(request, model)):
        warnings.append(f"no effect on this model: {', '.join(idle)}")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        warnings.append("stream_options.include_obfuscation: streams are never padded")
    return warnings


def _format_kind(request: CreateRequest) -> type | None:
    return type(request.text.format) if request.text is not None else None


_DEMANDS: tuple[tuple[str, Callable[[CreateRequest], bool], str], ...] = (
    ("text.format", lambda request: _format_kind(request) in (JsonSchemaFormat, JsonObjectFormat), "json_schema"),
    ("tools", lambda request: bool(request.tools), "tools"),
    ("top_logprobs", lambda request: bool(request.top_logprobs), "logprobs"),
    ("include", lambda request: "message.output_text.logprobs" in (request.include or ()), "logprobs"),
    ("presence_penalty", lambda request: bool(request.presence_penalty), "penalties"),
    ("frequency_penalty", lambda request: bool(request.frequency_penalty), "penalties"),
)


def check_updates(items: Sequence[Item | Unknown], *, param: str = "input") -> None:
    """Raise on an update among the new items that sets what cannot be, naming the place in `param`."""
    if ConfigurationUpdate not in map(type, items):  # nearly always
        return
    for index, item in enumerate(items):
        if isinstance(item, ConfigurationUpdate):
            _read(item, f"{param}[{index}]")


def apply_updates(request: CreateRequest, items: Sequence[Item | Unknown]) -> tuple[CreateRequest, list[str]]:
    """The request with what the newest updates set, and what is to be known about it.

    `items` is the whole history, in order. The new ones were checked; of the others, one that sets what cannot be must
    not stand in the way for ever.
    """
    if ConfigurationUpdate not in map(type, items):
        return request, []
    updates = [item for item in items if isinstance(item, ConfigurationUpdate)]
    request = copy(request)
    useless: list[str] = []
    for update in updates:
        try:
            effort, form = _read(update, "")
        except InvalidRequest as error:
            useless.append(f"the configuration_update {update.id} was left out: {error.message}")
            continue
        if update.reasoning is not None:
            before = request.reasoning or ReasoningConfig()
            request.reasoning = msgspec.structs.replace(before, effort=effort)
        if form is not None:
            request.text = msgspec.structs.replace(request.text or TextConfig(), format=form)
    return request, useless


def _read(update: ConfigurationUpdate, path: str) -> tuple[Effort | None, Format | None]:
    effort = update.reasoning.effort if update.reasoning is not None else None
    given = update.text.format if update.text is not None else None
    form = _convert(given, Format | None, _join(path, "text.format"))
    if isinstance(form, JsonSchemaFormat) and form.schema is None:
        place = _join(path, "text.format.schema")
        raise MissingParameter(f"Missing required parameter: '{place}'.", param=place)
    return _convert(effort, Effort | None, _join(path, "reasoning.effort")), form


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _convert(value: Any, kind: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault = validation.read(error)
        where = _join(path, fault.path) if fault.path else path
        raise InvalidRequest(f"Invalid '{where}': {fault.reason}.", param=where, code="invalid_value") from None
