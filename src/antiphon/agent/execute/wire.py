"""What a client sends to have a turn executed, and what it is told while that happens."""

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


class GivenContext(Envelope):
    """What the client wants to hold for the conversation; what is left out is as the server has it."""

    model_name: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    system: str | None = None


class RagChunk(Envelope):
    """A piece of text to answer from."""

    id: str
    path: str
    text: str
    start_line: int = 1
    end_line: int = 1
    score: float = 0.0
    semantic_id: str | None = None
    symbol: str | None = None
    symbol_type: str | None = None

    def as_chunk(self) -> Chunk:
        return Chunk(**structs.asdict(self))


class AgentExecuteBody(AgentExecuteRequest):
    """A turn, and what goes with it: where it belongs, what to answer from, and whether to tell how it goes.

    `rag_context_block` is text for the model as it is; without one it is made of the `rag_chunks`. These are also what
    the envelope names as its sources.
    """

    conversation_context_id: str | None = None
    agent_context_id: str | None = None
    conversation_context: GivenContext | None = None
    rag_context_block: str | None = None
    rag_chunks: list[RagChunk] = field(default_factory=list)
    stream: bool | None = None


class Progress(Envelope, omit_defaults=True):
    """Something that happened in a turn. Which fields it has depends on the type."""

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


def tell(event: RunEvent) -> Progress | None:
    """An event as the client is told of it. A word that says nothing is not."""
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
            return _tell_of_tool(event)


def _tell_of_tool(event: RunEvent) -> Progress | None:
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
