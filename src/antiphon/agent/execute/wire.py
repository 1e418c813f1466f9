"""The request body of the execute endpoint, and the progress events of its stream."""

from typing import Annotated, Literal

from msgspec import Meta, field, structs

from antiphon.agent.execute.envelope import AgentExecuteRequest, Envelope
from antiphon.agent.execute.rag import Chunk
from antiphon.agent.outcome import (
    Notice,
    ReasoningDelta,
    RunEvent,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnFinished,
    TurnStarted,
)


class RequestedContext(Envelope):
    """The part of the conversation context that the client sets. The server has defaults for the rest."""

    model_name: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    system: str | None = None


class RagChunk(Envelope):
    """A chunk of text for the model to answer from."""

    id: str
    path: str
    text: str
    start_line: int = 1
    end_line: int = 1
    score: float = 0.0
    semantic_id: str | None = None
    symbol: str | None = None
    symbol_type: str | None = None

    def to_chunk(self) -> Chunk:
        return Chunk(**structs.asdict(self))


class AgentExecuteBody(AgentExecuteRequest):
    """A turn with its context ids, its RAG context, and whether the response is a stream.

    `rag_context_block` is sent to the model unchanged; without one it is built from `rag_chunks`. The sources in the
    response are the chunks.
    """

    conversation_context_id: str | None = None
    agent_context_id: str | None = None
    conversation_context: RequestedContext | None = None
    rag_context_block: str | None = None
    rag_chunks: list[RagChunk] = field(default_factory=list)
    stream: bool | None = None


class Progress(Envelope, omit_defaults=True):
    """An event of a turn. Its fields depend on the type."""

    type: Literal[
        "turn.started",
        "text.delta",
        "reasoning.delta",
        "tool.started",
        "tool.progress",
        "tool.finished",
        "turn.finished",
        "notice",
    ]
    number: int | None = None
    text: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments_json: str | None = None
    is_error: bool | None = None
    message: str | None = None


def make_progress(event: RunEvent) -> Progress | None:
    """Return the progress event for an event of a run. Empty deltas and internal events have none."""
    match event:
        case TurnStarted():
            return Progress(type="turn.started", number=event.number)
        case TurnFinished():
            return Progress(type="turn.finished", number=event.number)
        case TextDelta() if event.text:
            return Progress(type="text.delta", text=event.text)
        case ReasoningDelta() if event.text:
            return Progress(type="reasoning.delta", text=event.text)
        case Notice():
            return Progress(type="notice", message=event.message)
        case _:
            return _make_tool_progress(event)


def _make_tool_progress(event: RunEvent) -> Progress | None:
    match event:
        case ToolStarted():
            call = event.call
            return Progress(type="tool.started", call_id=call.call_id, name=call.name, arguments_json=call.arguments)
        case ToolProgress():
            return Progress(type="tool.progress", call_id=event.call_id, message=event.message)
        case ToolFinished():
            call = event.call
            return Progress(type="tool.finished", call_id=call.call_id, name=call.name, is_error=event.is_error)
    return None
