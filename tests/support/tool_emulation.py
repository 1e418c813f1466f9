"""An engine with a scripted model that supports only functions. The SDK's types validate its items and events."""

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
# The SDK raises only on a nested error event, but its type is flat. A failure has codes that the SDK does not have.
_OWN_EVENTS = {"error", "response.failed"}


class Recorder(ScriptedBackend):
    """A scripted backend that records its turns."""

    def __init__(self, script: Json) -> None:
        super().__init__("recorder", msgspec.convert({"native_tools": ["function"]} | script, Script))
        self.capabilities = msgspec.structs.replace(self.capabilities, file_ids=True)
        self.turns: list[Turn] = []

    async def stream(self, turn: Turn) -> Deltas:
        self.turns.append(turn)
        return await super().stream(turn)


class Answer:
    """A response with its events as the client gets them, its warnings, and the turns of the model."""

    def __init__(self, response: Json, events: list[Json], warnings: list[str], turns: list[Turn]) -> None:
        self.response = response
        self.events = events
        self.warnings = warnings
        self.turns = turns

    @property
    def output(self) -> list[Json]:
        """The output items without their ids."""
        return [{name: value for name, value in item.items() if name != "id"} for item in self.response["output"]]

    @property
    def shown(self) -> list[str]:
        """The names of the tools in the last turn."""
        return [tool.name for tool in self.turns[-1].request.tools or ()]  # type: ignore[union-attr]  # functions have one

    @property
    def read(self) -> list[Json]:
        """The items of the last turn."""
        read: list[Json] = json.loads(codec.encode(self.turns[-1].items))
        return read

    def get_events(self, *kinds: str) -> list[Json]:
        return [event for event in self.events if event["type"].removeprefix("response.") in kinds]


class EmulationBench:
    def __init__(self, script: Json, **policy: Any) -> None:
        self.backend = Recorder(script)
        self.engine = Engine(backends={"test": self.backend}, store=MemoryStore(), policy=Policy(**policy))

    async def ask(self, input_items: Any = "hi", **fields: Any) -> Answer:
        body = codec.encode({"model": "scripted", "input": input_items} | fields)
        before = len(self.backend.turns)
        run = await self.engine.create(codec.decode_request(body).body, project="default")
        stream = [_decode(event) async for batch in run.events() for event in batch]
        response: Json = json.loads(codec.encode(fold(stream)))
        events: list[Json] = json.loads(codec.encode(stream))
        for item in response["output"]:
            _ITEM.validate_python(item)
        for event in events:
            if event["type"] not in _OWN_EVENTS and not _echoes_schema(event):
                _EVENT.validate_python(event)
        return Answer(response, events, run.warnings, self.backend.turns[before:])


def _decode(event: Any) -> Any:
    """Decode an event of a background response, which comes as stored bytes."""
    return codec.decode_event(event.raw) if isinstance(event, Unknown) else event


def _echoes_schema(event: Json) -> bool:
    """Return True if the event repeats a `json_schema` with a null schema, which the SDK's type does not allow."""
    text = event.get("response", {}).get("text") or {}
    return "schema" in (text.get("format") or {})


def call(name: str, arguments: Any, call_id: str = "call_1") -> Json:
    """Return a script step that calls a function."""
    return {"tool_call": {"name": name, "arguments": arguments, "call_id": call_id}}
