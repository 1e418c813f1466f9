"""An engine on a scripted model that only knows functions. All that its tests see is checked by the SDK's types."""

import json
from typing import Any

import msgspec
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from antiphon.backends.base import Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.protocol import codec
from antiphon.protocol.unions import Unknown
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import Deltas
from antiphon.stream.fold import fold

Json = dict[str, Any]
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# Our error event is nested, since the SDK raises on nothing else; its own type is flat. A failure has codes of ours.
_OWN_EVENTS = {"error", "response.failed"}


class Recorder(ScriptedBackend):
    """Keeps the turns it was given."""

    def __init__(self, script: Json) -> None:
        super().__init__("recorder", msgspec.convert({"native_tools": ["function"]} | script, Script))
        self.turns: list[Turn] = []

    async def stream(self, turn: Turn) -> Deltas:
        self.turns.append(turn)
        return await super().stream(turn)


class Answer:
    """A response with its events, as a client sees them, and what the model was given for it."""

    def __init__(self, response: Json, events: list[Json], warnings: list[str], turns: list[Turn]) -> None:
        self.response = response
        self.events = events
        self.warnings = warnings
        self.turns = turns

    @property
    def output(self) -> list[Json]:
        """The items, without the ids that are of our making."""
        return [{name: value for name, value in item.items() if name != "id"} for item in self.response["output"]]

    @property
    def shown(self) -> list[str]:
        """The names of the tools that the model saw at last."""
        return [tool.name for tool in self.turns[-1].request.tools or ()]  # type: ignore[union-attr]  # functions have one

    @property
    def read(self) -> list[Json]:
        """The items that the model read at last."""
        read: list[Json] = json.loads(codec.encode(self.turns[-1].items))
        return read

    def told(self, *kinds: str) -> list[Json]:
        return [event for event in self.events if event["type"].removeprefix("response.") in kinds]


class EmulationBench:
    def __init__(self, script: Json, **policy: Any) -> None:
        self.backend = Recorder(script)
        self.engine = Engine(backends={"test": self.backend}, store=MemoryStore(), policy=Policy(**policy))

    async def ask(self, asked: Any = "hi", **fields: Any) -> Answer:
        body = codec.encode({"model": "scripted", "input": asked} | fields)
        before = len(self.backend.turns)
        run = await self.engine.create(codec.decode_request(body).request, project="default")
        stream = [_open(event) async for batch in run.events() for event in batch]
        response: Json = json.loads(codec.encode(fold(stream)))
        events: list[Json] = json.loads(codec.encode(stream))
        for item in response["output"]:
            _ITEM.validate_python(item)
        for event in events:
            if event["type"] not in _OWN_EVENTS and not _echoes_schema(event):
                _EVENT.validate_python(event)
        return Answer(response, events, run.warnings, self.backend.turns[before:])


def _open(event: Any) -> Any:
    """The events of a background response come as they were kept."""
    return codec.decode_event(event.raw) if isinstance(event, Unknown) else event


def _echoes_schema(event: Json) -> bool:
    """Open Responses has a response repeat `json_schema` with null for the schema; the SDK's type does not."""
    text = event.get("response", {}).get("text") or {}
    return "schema" in (text.get("format") or {})


def call(name: str, arguments: Any, call_id: str = "call_1") -> Json:
    """A step of a script: the model calls a function."""
    return {"tool_call": {"name": name, "arguments": arguments, "call_id": call_id}}
