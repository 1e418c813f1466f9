"""From a turn to the body of `POST /responses`: the contract, and on top of it what the client wished for itself."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from antiphon.backends.base import Turn
from antiphon.backends.responses.contract import (
    ReasoningControls,
    ResponsesApiRequest,
    TextControls,
    is_azure,
    takes_verbosity,
    validate,
    write_format,
)
from antiphon.protocol import codec
from antiphon.protocol.content import InputText, OutputText, Part, ReasoningText, Text, extract_text
from antiphon.protocol.hosted import LocalShellCallOutput
from antiphon.protocol.items import CustomToolCallOutput, FunctionCall, FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.request import ENCRYPTED_REASONING, CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.upstream.fields import normalize_arguments
from antiphon.upstream.options import UpstreamOptions, is_header_value

# What is ours alone: the ids under which we know items, what became of them, and who made them.
_OURS = ("id", "status", "created_by")
_TEXTS = (InputText, OutputText, Text)


class Options(UpstreamOptions, kw_only=True):
    """`state` says who keeps what was said: this server, which then sends the whole context with every turn, or the
    upstream, which is then sent what is new. `session_headers` tells the upstream which turns belong together.
    `reasoning_text` sends a model's raw reasoning back to it, which some open models want and OpenAI's refuse.
    """

    state: Literal["local", "upstream"] = "local"
    session_headers: bool = True
    reasoning_text: bool = False


def write_items(items: Iterable[Item | Unknown], *, ids: bool, reasoning_text: bool) -> list[Item | Unknown]:
    """The items without what is ours alone; `ids` says whether theirs are sent nevertheless."""
    written = (_write(item, ids=ids, reasoning_text=reasoning_text) for item in items)
    return [item for item in written if item is not None]


def _write(item: Item | Unknown, *, ids: bool, reasoning_text: bool) -> Item | Unknown | None:
    match item:
        case Unknown():
            return item
        case Message() if not isinstance(item.content, str):
            item = msgspec.structs.replace(item, content=[_write_part(part, item.role) for part in item.content])
        case FunctionCall():
            item = msgspec.structs.replace(item, arguments=normalize_arguments(item.arguments))
        case FunctionCallOutput() | CustomToolCallOutput() if not isinstance(item.output, str):
            item = _write_output(item)
        case LocalShellCallOutput():  # the API knows it by the id of its call
            item = msgspec.structs.replace(item, id=item.call_id, given_call_id=None)
        case Reasoning():
            kept = _write_reasoning_item(item, reasoning_text=reasoning_text)
            if kept is None:
                return None
            item = kept
        case _:
            pass
    left_out = dict.fromkeys(_find_ours(type(item), ids=ids))
    return msgspec.structs.replace(item, **left_out) if left_out else item


@functools.cache
def _find_ours(kind: type[msgspec.Struct], *, ids: bool) -> Sequence[str]:
    """The fields to leave out. What the API asks for, stays: there, any id will do."""
    optional = {field.name for field in msgspec.structs.fields(kind) if field.default is None}
    return [name for name in _OURS if name in optional and not (ids and name == "id")]


def _write_part(part: Part | Unknown, role: str) -> Part | Unknown:
    if not isinstance(part, Text):
        return part
    return OutputText(part.text) if role == "assistant" else InputText(part.text)


def _write_output(item: FunctionCallOutput | CustomToolCallOutput) -> FunctionCallOutput | CustomToolCallOutput:
    """Text alone goes as a string, which every server takes; pictures and files need their parts."""
    parts = item.output
    assert not isinstance(parts, str)
    if all(isinstance(part, _TEXTS) for part in parts):
        return msgspec.structs.replace(item, output=extract_text(parts))
    return msgspec.structs.replace(item, output=[_write_part(part, "user") for part in parts])


def _write_reasoning_item(item: Reasoning, *, reasoning_text: bool) -> Reasoning | None:
    """Reasoning that would say nothing is left out."""
    content = item.content
    if not reasoning_text and any(isinstance(part, ReasoningText) for part in content or ()):
        content = None
    if not (content or item.summary or item.encrypted_content):
        return None
    return msgspec.structs.replace(item, content=content)


WIRE_API = "responses"

# Wishes that go as they are. The rest of the API's parameters is about state, which the engine keeps, or done by it.
_WISHES = (
    "max_tool_calls",
    "temperature",
    "top_p",
    "top_logprobs",
    "max_output_tokens",
    "metadata",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
    "image",
    "moderation",
    "access_programs",
    "client_metadata",
)
# OpenAI does not have these: a zero, which some clients send with every request, asks for nothing.
_PENALTIES = ("presence_penalty", "frequency_penalty")

_HEADERS = {"Accept": "text/event-stream", "OpenAI-Beta": "responses=experimental"}


class Continuation(msgspec.Struct, frozen=True):
    """A response that the upstream has kept, and the items that come after it."""

    previous_response_id: str
    items: Sequence[Item | Unknown]


class Question(msgspec.Struct, frozen=True):
    """What is sent, and what the log should say about it."""

    body: bytes
    headers: Mapping[str, str]
    warnings: Sequence[str] = ()


class Writer:
    """Writes the requests for one upstream. `name` is what the configuration calls it."""

    def __init__(self, name: str, options: Options) -> None:
        self._options = options
        self.azure = is_azure(options.base_url, wire_api=WIRE_API, name=name)

    def credentials(self) -> dict[str, str]:
        """The headers that say who we are."""
        key = self._options.api_key
        if key is None:
            return {}
        return {"api-key": key} if self.azure else {"Authorization": f"Bearer {key}"}

    def write(self, turn: Turn, continuation: Continuation | None = None, *, wants_seals: bool = True) -> Question:
        """The request that asks for this turn. Raises what a server would only refuse.

        With `wants_seals`, reasoning is asked for in its encrypted form, too.
        """
        request = turn.request
        items = turn.items if continuation is None else continuation.items
        contract = self._make_contract(turn, items, wants_seals=wants_seals)
        validate(contract)
        wishes = self._collect_wishes(request, contract)
        if continuation is not None:
            wishes["previous_response_id"] = continuation.previous_response_id
        body = codec.encode(_merge(contract, wishes) if wishes else contract)
        warnings = []
        if request.text is not None and request.text.verbosity and not takes_verbosity(contract.model):
            warnings.append(f"text.verbosity: left out, since '{contract.model}' is not of the gpt-5 family")
        return Question(body, self._make_headers(contract), warnings)

    def write_count(self, turn: Turn) -> bytes:
        """The body of `POST /responses/input_tokens`."""
        contract = self._make_contract(turn, turn.items, wants_seals=False)
        fields = _merge(contract, self._collect_wishes(turn.request, contract))
        return codec.encode({name: fields[name] for name in _COUNTED if name in fields})

    def _make_contract(self, turn: Turn, items: Sequence[Item | Unknown], *, wants_seals: bool) -> ResponsesApiRequest:
        request, options = turn.request, self._options
        reasoning = _write_reasoning(request)
        return ResponsesApiRequest(
            model=request.model or "",
            instructions=request.instructions or "",
            input=write_items(items, ids=self.azure, reasoning_text=options.reasoning_text),
            tools=request.tools or [],
            reasoning=reasoning,
            store=self.azure,
            include=[ENCRYPTED_REASONING] if wants_seals and reasoning is not UNSET else [],
            prompt_cache_key=_find_cache_key(request) or UNSET,
            text=_write_text(request),
        )

    def _collect_wishes(self, request: CreateRequest, contract: ResponsesApiRequest) -> dict[str, Any]:
        wishes = {name: value for name in _WISHES if (value := getattr(request, name)) not in (None, {})}
        wishes |= {name: value for name in _PENALTIES if (value := getattr(request, name))}
        if request.tool_choice not in (None, "auto"):
            wishes["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls:
            wishes["parallel_tool_calls"] = True
        more = [each for each in request.include or () if each not in contract.include]
        if more:
            wishes["include"] = [*contract.include, *more]
        if self._options.state == "upstream":
            wishes["store"] = True
            if request.truncation is not None:
                wishes["truncation"] = request.truncation
        return wishes

    def _make_headers(self, contract: ResponsesApiRequest) -> dict[str, str]:
        key = contract.prompt_cache_key
        if not self._options.session_headers or not isinstance(key, str) or not is_header_value(key):
            return _HEADERS
        return {**_HEADERS, "conversation_id": key, "session_id": key}


def list_ignored(request: CreateRequest, model: str) -> list[str]:
    """Which parameters of a request are left out of its body."""
    asked = request.text.verbosity if request.text is not None else None
    return ["text.verbosity"] if asked is not None and not takes_verbosity(model) else []


# Of a request, what the model reads.
_COUNTED = ("model", "instructions", "input", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text")


def _merge(contract: ResponsesApiRequest, wishes: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: getattr(contract, name) for name in contract.__struct_fields__}
    return {name: value for name, value in (fields | dict(wishes)).items() if value is not UNSET}


def _write_reasoning(request: CreateRequest) -> ReasoningControls | msgspec.UnsetType:
    asked = request.reasoning
    if asked is None:
        return UNSET
    summary = asked.summary if asked.summary is not None else asked.generate_summary
    given: dict[str, Any] = {"effort": asked.effort, "summary": summary, "context": asked.context, "mode": asked.mode}
    return ReasoningControls(**{name: value for name, value in given.items() if value is not None})


def _write_text(request: CreateRequest) -> TextControls | msgspec.UnsetType:
    asked = request.text
    if asked is None:
        return UNSET
    controls = TextControls()
    if asked.format is not None:
        controls.format = write_format(asked.format)
    if asked.verbosity is not None and takes_verbosity(request.model or ""):
        controls.verbosity = asked.verbosity
    return controls if controls != TextControls() else UNSET


def _find_cache_key(request: CreateRequest) -> str | None:
    """What belongs together, belongs to one conversation."""
    conversation = request.conversation
    if request.prompt_cache_key is not None or conversation is None:
        return request.prompt_cache_key
    return conversation if isinstance(conversation, str) else conversation.id
