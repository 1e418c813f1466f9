"""From a turn to the body of `POST /responses`: the contract, and on top of it what the client wished for itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from antiphon.backends.base import Turn
from antiphon.backends.responses.history import write_items
from antiphon.backends.responses.options import Options
from antiphon.backends.upstream.options import fits_header
from antiphon.protocol import codec
from antiphon.protocol.contract import (
    ENCRYPTED_REASONING,
    Reasoning,
    ResponsesApiRequest,
    TextControls,
    is_azure,
    takes_verbosity,
    validate,
    write_format,
)
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest

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
        if not self._options.session_headers or not isinstance(key, str) or not fits_header(key):
            return _HEADERS
        return {**_HEADERS, "conversation_id": key, "session_id": key}


def list_idle(request: CreateRequest, model: str) -> list[str]:
    """Which parameters of a request are left out of its body."""
    asked = request.text.verbosity if request.text is not None else None
    return ["text.verbosity"] if asked is not None and not takes_verbosity(model) else []


# Of a request, what the model reads.
_COUNTED = ("model", "instructions", "input", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text")


def _merge(contract: ResponsesApiRequest, wishes: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: getattr(contract, name) for name in contract.__struct_fields__}
    return {name: value for name, value in (fields | dict(wishes)).items() if value is not UNSET}


def _write_reasoning(request: CreateRequest) -> Reasoning | msgspec.UnsetType:
    asked = request.reasoning
    if asked is None:
        return UNSET
    summary = asked.summary if asked.summary is not None else asked.generate_summary
    given: dict[str, Any] = {"effort": asked.effort, "summary": summary, "context": asked.context, "mode": asked.mode}
    return Reasoning(**{name: value for name, value in given.items() if value is not None})


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
