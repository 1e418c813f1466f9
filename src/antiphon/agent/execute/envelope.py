"""The request and response envelopes of an agent's turn. They are independent of the API of the model.

On the wire the names are in PascalCase. Requests may use other spellings: `conversationId`, `conversation_id`,
`CONVERSATIONID`.
"""

from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct, structs

from antiphon.errors import InvalidRequest
from antiphon.protocol import validation


class Envelope(Struct, rename="pascal", kw_only=True):
    """Base of the structs with PascalCase names."""


class ConversationContext(Envelope):
    """Settings of a whole conversation: the model, its temperature, and the system prompt."""

    model_name: str
    temperature: float
    system: str | None = None


class AgentExecuteRequest(Envelope):
    """One turn of an agent.

    `response_continuation_id` is that of the response before. `tools_json` and `tool_results_json` are JSON arrays as
    text; malformed text does not fail the turn.
    """

    conversation_id: str | None = None
    mode: str = ""
    instruction: str = ""
    response_continuation_id: str | None = None
    tools_json: str | None = None
    tool_choice_name: str | None = None
    tool_results_json: str | None = None
    system_prompt: str | None = None


class ExecutionContext(Envelope):
    """The ids of the contexts of a turn. `turn_id` is set if an internal counter numbers the turns."""

    conversation_context_id: str | None = None
    agent_context_id: str | None = None
    turn_id: str | None = None


class LlmUsage(Envelope):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class SourceRef(Envelope):
    """A source of the answer: a chunk of text that the model has read. Answers cite it by `tag`."""

    tag: str
    path: str | None = None
    file_name: str | None = None
    start: int | None = None
    end: int | None = None
    excerpt: str | None = None
    symbol: str | None = None
    symbol_type: str | None = None


class BundledFile(Envelope):
    action: str
    path: str
    contents: str | None = None


class FileBundle(Envelope):
    """Files that an agent has created or changed."""

    root: str = "."
    files: list[BundledFile] = []


class AgentToolCall(Envelope):
    """A tool call. `arguments_json` is the text of the model, unchanged. The optional fields describe its execution."""

    call_id: str
    name: str
    arguments_json: str
    is_server_tool: bool | None = None
    was_executed: bool | None = None
    result_json: str | None = None
    error_message: str | None = None
    requires_client_execution: bool | None = None
    execution_ms: int | None = None


class AgentExecuteResponse(Envelope):
    """The result of a turn. `kind` is `ok`, `tool-only`, `error` or `empty`."""

    kind: str
    conversation_id: str | None = None
    turn_id: str | None = None
    agent_context_id: str | None = None
    conversation_context_id: str | None = None
    response_continuation_id: str | None = None
    mode: str | None = None
    model_id: str | None = None
    text: str | None = None
    finish_reason: str | None = None
    usage: LlmUsage = msgspec.field(default_factory=LlmUsage)
    sources: list[SourceRef] = []
    file_bundle: FileBundle | None = None
    warnings: list[str] = []
    error_code: str | None = None
    error_message: str | None = None
    raw_response_json: str | None = None
    tool_calls: list[AgentToolCall] = []


E = TypeVar("E", bound=Envelope)
T = TypeVar("T")


def encode(envelope: Envelope) -> bytes:
    return msgspec.json.encode(envelope)


def decode(body: bytes | str, kind: type[E]) -> E:
    """Decode an envelope. Null is the same as a missing field. Raises InvalidRequest, which names the field."""
    return _decode(body, kind, kind)


def decode_all(body: bytes | str, kind: type[E]) -> list[E]:
    """Decode a JSON array of envelopes."""
    return _decode(body, list[kind], kind)  # type: ignore[valid-type]  # made at run time


def _decode(body: bytes | str, target: type[T], kind: type[Envelope]) -> T:
    try:
        return msgspec.convert(_normalise_keys(msgspec.json.decode(body), kind), target)
    except msgspec.ValidationError as error:
        raise validation.parse_error(error).to_invalid_request() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def list_unknown(body: bytes | str, kind: type[Envelope]) -> list[str]:
    """Return the names in the JSON that are not fields of the envelope."""
    known = {_fold(field.encode_name) for field in structs.fields(kind)}
    return [name for name in msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if _fold(name) not in known]


def _normalise_keys(value: Any, kind: Any) -> Any:
    """Return the value with the keys in the spelling of the envelope."""
    options = get_args(kind) or (kind,)
    for each in options:
        if isinstance(each, type) and issubclass(each, Envelope) and isinstance(value, dict):
            fields = {_fold(field.encode_name): field for field in structs.fields(each)}
            known = ((fields.get(_fold(key)), key, inner) for key, inner in value.items())
            return {
                field.encode_name if field else key: _normalise_keys(inner, field.type) if field else inner
                for field, key, inner in known
                if not (field is not None and inner is None and not field.required)
            }
        if isinstance(value, list) and isinstance(each, type) and issubclass(each, Envelope):
            return [_normalise_keys(inner, each) for inner in value]
    return value


def _fold(name: str) -> str:
    return name.replace("_", "").lower()
