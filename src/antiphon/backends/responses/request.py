"""Translate a turn into a request to `POST /responses`: the contract's body, plus the client's other parameters."""

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
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
from antiphon.protocol import codec, hosted
from antiphon.protocol.content import InputText, OutputText, Part, ReasoningText, Text, extract_text
from antiphon.protocol.items import (
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
    remove_own_id,
)
from antiphon.protocol.request import ENCRYPTED_REASONING, CreateRequest, get_conversation_id
from antiphon.protocol.unions import Unknown
from antiphon.upstream.fields import normalize_arguments
from antiphon.upstream.options import UpstreamOptions, is_header_value

WIRE_API = "responses"

# Parameters that are forwarded unchanged. The engine handles the others: they concern state, or it emulates them.
_FORWARDED = (
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
_get_forwarded = attrgetter(*_FORWARDED)
_NOTHING_FORWARDED = (None,) * len(_FORWARDED)
# The minimum of OpenAI and Open Responses. After rounds of tool calls, the rest of a response's limit may be less.
_MIN_OUTPUT_TOKENS = 16
# OpenAI rejects these. Some clients send a zero with every request, which means the default.
_PENALTIES = ("presence_penalty", "frequency_penalty")
# Fields of the contract that may be unset.
_OPTIONAL_FIELDS = ("reasoning", "prompt_cache_key", "text")
# The fields that the token count depends on.
_COUNTED_FIELDS = (
    "model", "instructions", "input", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text",
)  # fmt: skip
# Item fields with our own ids, statuses and authors.
_LOCAL_FIELDS = ("id", "status", "created_by")
# Types whose status the API's own types require. Clients may omit it.
_TYPES_WITH_STATUS = frozenset(
    {
        hosted.ApplyPatchCall,
        hosted.CodeInterpreterCall,
        hosted.ComputerCall,
        hosted.FileSearchCall,
        hosted.ImageGenerationCall,
        hosted.LocalShellCall,
        hosted.ProgramOutput,
        hosted.WebSearchCall,
    }
)
_TEXT_PARTS = (InputText, OutputText, Text)
_FOREIGN_TO_ASSISTANT: frozenset[type] = frozenset({InputText, Text})
_FOREIGN_TO_INPUT: frozenset[type] = frozenset({OutputText, Text})
# The API rejects longer ones. Other models, and some agents, make them.
_MAX_CALL_ID_LENGTH = 64

_HEADERS = {"Accept": "application/json", "OpenAI-Beta": "responses=experimental"}
_STREAM_HEADERS = _HEADERS | {"Accept": "text/event-stream"}


class ResponsesOptions(UpstreamOptions, kw_only=True):
    """The options of one backend.

    `state`: "local" sends the whole context with every turn; with "upstream", the upstream stores the conversation and
    gets only new items. `session_headers` sends headers that tell the upstream which turns belong together.
    `reasoning_text` returns a model's raw reasoning to it, which some open models want and OpenAI's reject.
    """

    state: Literal["local", "upstream"] = "local"
    session_headers: bool = True
    reasoning_text: bool = False


class PreviousResponse(msgspec.Struct, frozen=True):
    """A response that the upstream has stored, and the items that follow it."""

    id: str
    new_items: Sequence[Item | Unknown]


class UpstreamRequest(msgspec.Struct, frozen=True):
    """A request to send. `warnings` are for the log."""

    body: bytes
    headers: Mapping[str, str]
    warnings: Sequence[str] = ()


class RequestWriter:
    """Writes the requests to one upstream. `name` is the backend's name in the configuration."""

    def __init__(self, name: str, options: ResponsesOptions) -> None:
        self._options = options
        self.is_azure = is_azure(options.base_url, wire_api=WIRE_API, name=name)

    def make_credentials(self) -> dict[str, str]:
        """Return the authentication headers."""
        key = self._options.api_key
        if key is None:
            return {}
        return {"api-key": key} if self.is_azure else {"Authorization": f"Bearer {key}"}

    def write(
        self, turn: Turn, previous: PreviousResponse | None = None, *, can_encrypt: bool = True, stream: bool = True
    ) -> UpstreamRequest:
        """Return the request for a turn. Raises InvalidRequest if no server could accept it.

        With `can_encrypt`, encrypted reasoning is requested too. Without `stream`, the answer is not streamed.
        """
        request = turn.request
        items = turn.items if previous is None else previous.new_items
        known_ids = () if previous is None else _find_stored_ids(items)
        contract = self._make_contract(turn, items, can_encrypt=can_encrypt, known_ids=known_ids)
        validate(contract)
        params = self._collect_params(request, contract)
        if previous is not None:
            params["previous_response_id"] = previous.id
        if not stream:
            params["stream"] = False
        # The contract always has instructions. A client that sent none gets the upstream's default.
        is_contract = not params and request.instructions is not None
        body = codec.encode(contract if is_contract else _merge(contract, params, request))
        warnings = []
        if request.text is not None and request.text.verbosity and not takes_verbosity(contract.model):
            warnings.append(f"text.verbosity: omitted, because '{contract.model}' is not of the gpt-5 family")
        return UpstreamRequest(body, self._make_headers(contract, stream=stream), warnings)

    def write_count_request(self, turn: Turn) -> bytes:
        """Return the body of `POST /responses/input_tokens`."""
        contract = self._make_contract(turn, turn.items, can_encrypt=False)
        fields = _merge(contract, self._collect_params(turn.request, contract), turn.request)
        return codec.encode({name: fields[name] for name in _COUNTED_FIELDS if name in fields})

    def _make_contract(
        self, turn: Turn, items: Sequence[Item | Unknown], *, can_encrypt: bool, known_ids: Collection[str] = ()
    ) -> ResponsesApiRequest:
        request, options = turn.request, self._options
        reasoning = _write_reasoning(request)
        return ResponsesApiRequest(
            model=request.model or "",
            instructions=request.instructions or "",
            input=write_items(
                items, include_ids=self.is_azure, reasoning_text=options.reasoning_text, known_ids=known_ids
            ),
            tools=request.tools or [],
            reasoning=reasoning,
            store=self.is_azure,
            include=[ENCRYPTED_REASONING] if can_encrypt and reasoning is not UNSET else [],
            prompt_cache_key=_find_cache_key(request) or UNSET,
            text=_write_text(request),
        )

    def _collect_params(self, request: CreateRequest, contract: ResponsesApiRequest) -> dict[str, Any]:
        """Return the client's parameters that are not in the contract, or differ from it."""
        params: dict[str, Any] = {}
        values = _get_forwarded(request)
        if values != _NOTHING_FORWARDED:  # most requests have few of them, many have none
            params = {name: value for name, value in zip(_FORWARDED, values, strict=True) if value not in (None, {})}
            if request.max_output_tokens is not None:
                params["max_output_tokens"] = max(request.max_output_tokens, _MIN_OUTPUT_TOKENS)
        if request.presence_penalty or request.frequency_penalty:
            params |= {name: value for name in _PENALTIES if (value := getattr(request, name))}
        if request.tool_choice not in (None, "auto"):
            params["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls:
            params["parallel_tool_calls"] = True
        if request.include and (more := [each for each in request.include if each not in contract.include]):
            params["include"] = [*contract.include, *more]
        if self._options.state == "upstream":
            params["store"] = True
            if request.truncation is not None:
                params["truncation"] = request.truncation
        return params

    def _make_headers(self, contract: ResponsesApiRequest, *, stream: bool) -> dict[str, str]:
        headers = _STREAM_HEADERS if stream else _HEADERS
        key = contract.prompt_cache_key
        if not self._options.session_headers or not isinstance(key, str) or not is_header_value(key):
            return headers
        return {**headers, "conversation_id": key, "session_id": key}


def list_ignored_params(request: CreateRequest, model: str) -> list[str]:
    """Return the parameters that are omitted for this model."""
    verbosity = request.text.verbosity if request.text is not None else None
    return ["text.verbosity"] if verbosity is not None and not takes_verbosity(model) else []


def _merge(contract: ResponsesApiRequest, params: dict[str, Any], request: CreateRequest) -> dict[str, Any]:
    """Return the fields of the contract with the client's parameters, and without instructions if there are none."""
    fields = msgspec.structs.asdict(contract)
    if request.instructions is None:
        del fields["instructions"]
    for name in _OPTIONAL_FIELDS:
        if fields[name] is UNSET:
            del fields[name]
    return fields | params


def _write_reasoning(request: CreateRequest) -> ReasoningControls | msgspec.UnsetType:
    config = request.reasoning
    if config is None:
        return UNSET
    summary = config.summary if config.summary is not None else config.generate_summary
    fields = {"effort": config.effort, "summary": summary, "context": config.context, "mode": config.mode}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    return ReasoningControls(**given)


def _write_text(request: CreateRequest) -> TextControls | msgspec.UnsetType:
    config = request.text
    if config is None:
        return UNSET
    controls = TextControls()
    if config.format is not None:
        controls.format = write_format(config.format)
    if config.verbosity is not None and takes_verbosity(request.model or ""):
        controls.verbosity = config.verbosity
    return controls if controls != TextControls() else UNSET


def _find_cache_key(request: CreateRequest) -> str | None:
    """Return the request's cache key, else the id of its conversation."""
    return get_conversation_id(request) if request.prompt_cache_key is None else request.prompt_cache_key


# Items


def write_items(
    items: Iterable[Item | Unknown],
    *,
    include_ids: bool,
    reasoning_text: bool,
    known_ids: Collection[str] = (),
) -> list[Item | Unknown]:
    """Return the items without local fields; with their ids if `include_ids`.

    `known_ids` are the ids of calls that the upstream has stored. They stay as they are.
    """
    written: list[Item | Unknown] = []
    for item in items:
        changed = _write_item(item, include_ids=include_ids, reasoning_text=reasoning_text, known_ids=known_ids)
        if changed is not None:
            written.append(changed)
    return written


def _write_item(
    item: Item | Unknown, *, include_ids: bool, reasoning_text: bool, known_ids: Collection[str]
) -> Item | Unknown | None:
    if type(item) is Message:
        content = item.content
        if not isinstance(content, str) and not _find_foreign_texts(item.role).isdisjoint(map(type, content)):
            content = [_write_part(part, item.role) for part in content]
        return Message(item.role, content, item.id if include_ids else None, phase=item.phase)
    match item:
        case Unknown():
            return item if include_ids else remove_own_id(item)
        case FunctionCall():
            item = msgspec.structs.replace(item, arguments=normalize_arguments(item.arguments))
        case FunctionCallOutput() | CustomToolCallOutput() if not isinstance(item.output, str):
            item = _write_call_output(item)
        case hosted.LocalShellCallOutput():  # the API identifies it by the id of its call
            item = msgspec.structs.replace(item, id=item.call_id, given_call_id=None)
        case Reasoning():
            reasoning = _write_reasoning_item(item, reasoning_text=reasoning_text)
            if reasoning is None:
                return None
            item = reasoning
        case _:
            pass
    changes: dict[str, Any] = dict.fromkeys(_find_local_fields(type(item), include_ids=include_ids))
    call_id = getattr(item, "call_id", None)
    if call_id is not None and len(call_id) > _MAX_CALL_ID_LENGTH and call_id not in known_ids:
        field = "id" if isinstance(item, hosted.LocalShellCallOutput) else "call_id"
        changes[field] = _shorten_call_id(call_id)
    return msgspec.structs.replace(item, **changes) if changes else item


def _find_stored_ids(items: Iterable[Item | Unknown]) -> set[str]:
    """Return the call ids of outputs whose calls are in the stored response: the upstream has made these ids."""
    called: set[str] = set()
    answered: set[str] = set()
    for item in items:
        call_id = getattr(item, "call_id", None)
        if call_id is not None:
            (answered if item.type.endswith("_output") else called).add(call_id)
    return answered - called


def _shorten_call_id(call_id: str) -> str:
    """Return an id that depends on the call id alone, so that a call and its output still match."""
    return f"call_{hashlib.sha256(call_id.encode()).hexdigest()[:32]}"


@functools.cache
def _find_local_fields(kind: type[msgspec.Struct], *, include_ids: bool) -> Sequence[str]:
    """Return the fields to omit. Fields that the API requires stay: it accepts any id there."""
    optional = {field.name for field in msgspec.structs.fields(kind) if field.default is None}
    if kind in _TYPES_WITH_STATUS:
        optional.discard("status")
    return [name for name in _LOCAL_FIELDS if name in optional and not (include_ids and name == "id")]


def _find_foreign_texts(role: str) -> frozenset[type]:
    """Return the types of text that the API rejects in messages of this role. Many clients mix them up."""
    return _FOREIGN_TO_ASSISTANT if role == "assistant" else _FOREIGN_TO_INPUT


def _write_part(part: Part | Unknown, role: str) -> Part | Unknown:
    if not isinstance(part, _TEXT_PARTS) or type(part) not in _find_foreign_texts(role):
        return part
    return OutputText(part.text) if role == "assistant" else InputText(part.text)


def _write_call_output(item: FunctionCallOutput | CustomToolCallOutput) -> FunctionCallOutput | CustomToolCallOutput:
    """Write text as a string, which every server accepts. Images and files stay in parts."""
    parts = item.output
    assert not isinstance(parts, str)
    if all(isinstance(part, _TEXT_PARTS) for part in parts):
        return msgspec.structs.replace(item, output=extract_text(parts))
    return msgspec.structs.replace(item, output=[_write_part(part, "user") for part in parts])


def _write_reasoning_item(item: Reasoning, *, reasoning_text: bool) -> Reasoning | None:
    """Return the item without raw text unless `reasoning_text`; None if nothing is left of it."""
    content = item.content
    if not reasoning_text and any(isinstance(part, ReasoningText) for part in content or ()):
        content = None
    if not (content or item.summary or item.encrypted_content):
        return None
    return msgspec.structs.replace(item, content=content)
