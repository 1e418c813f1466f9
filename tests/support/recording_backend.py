"""A scripted backend that records the turns it gets."""

import json
from typing import Any

import msgspec

from antiphon.backends.base import Capabilities, Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from antiphon.protocol import codec
from antiphon.stream.deltas import Deltas


class RecordingBackend(ScriptedBackend):
    """`only_functions`: the backend supports no other tools than functions."""

    def __init__(self, script: dict[str, Any], *, only_functions: bool = False) -> None:
        super().__init__("scripted", msgspec.json.decode(msgspec.json.encode(script), type=Script))
        self.turns: list[Turn] = []
        if only_functions:
            self.capabilities = Capabilities(tools=frozenset({"function"}))

    async def stream(self, turn: Turn) -> Deltas:
        self.turns.append(turn)
        return await super().stream(turn)

    def input_items(self) -> list[list[dict[str, Any]]]:
        """Return the items of every turn, as JSON data."""
        return [[json.loads(codec.encode(item)) for item in turn.items] for turn in self.turns]

    def last_item(self, kind: str) -> dict[str, Any]:
        return [item for item in self.input_items()[-1] if item.get("type", "message") == kind][-1]
