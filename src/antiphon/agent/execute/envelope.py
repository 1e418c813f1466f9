"""What goes in and out of an agent's turn: a stable envelope around whatever the model's API looks like.

On the wire the names are in PascalCase. On the way in any spelling of them will do: `conversationId`,
`conversation_id`, `CONVERSATIONID`.
"""

from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct, structs

from antiphon.errors import InvalidRequest
from antiphon.protocol import validation


class Envelope(Struct, rename="pascal", kw_only=True):
    """Base of all that is spelled in PascalCase."""


class ConversationContext(Envelope):
    """What holds for a whole conversation: the model, its temperature, and the system prompt it starts from."""

    model_name: str
    temperature: float
    system: str | None = None


class AgentExecuteRequest(Envelope):
    """One turn that a client asks for.

    `response_continuation_id` is what the turn before gave out. `tools_json` and `tool_results_json` are JSON arrays as
    text: what is wrong in them must not lose the turn.
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
    """Where a turn is executed. `turn_id` is the number of an internal counter, if there is one."""

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
    """A piece of text that the model was given to answer from. `tag` is what answers cite it by."""

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
    """Files that an agent has made or changed."""

    root: str = "."
    files: list[BundledFile] = []


class AgentToolCall(Envelope):
    """A call of a tool, as the model made it: `arguments_json` is its very text. The rest says what became of it."""

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
    """What a turn came to. `kind` is `ok`, `tool-only`, `error` or `empty`."""

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
    """An envelope out of its JSON. Raises InvalidRequest, naming the field. What is null is as if left out."""
    return _decode(body, kind, kind)


def decode_all(body: bytes | str, kind: type[E]) -> list[E]:
    """The envelopes of a JSON array."""
    return _decode(body, list[kind], kind)  # type: ignore[valid-type]  # made at run time


def _decode(body: bytes | str, whole: type[T], kind: type[Envelope]) -> T:
    try:
        read = msgspec.json.decode(body)
        return msgspec.convert(_spell(read, kind), whole)
    except msgspec.ValidationError as error:
        raise validation.parse_error(error).to_invalid_request() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def list_unknown(body: bytes | str, kind: type[Envelope]) -> list[str]:
    """The fields of an envelope's JSON that it has no place for."""
    known = {_fold(field.encode_name) for field in structs.fields(kind)}
    return [name for name in msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if _fold(name) not in known]


def _spell(value: Any, kind: Any) -> Any:
    """The value with its keys as the envelope spells them."""
    options = get_args(kind) or (kind,)
    for each in options:
        if isinstance(each, type) and issubclass(each, Envelope) and isinstance(value, dict):
            fields = {_fold(field.encode_name): field for field in structs.fields(each)}
            known = ((fields.get(_fold(key)), key, inner) for key, inner in value.items())
            return {
                field.encode_name if field else key: _spell(inner, field.type) if field else inner
                for field, key, inner in known
                if not (field is not None and inner is None and not field.required)
            }
        if isinstance(value, list) and isinstance(each, type) and issubclass(each, Envelope):
            return [_spell(inner, each) for inner in value]
    return value


def _fold(name: str) -> str:
    return name.replace("_", "").lower()
