"""A scripted model that remembers what it was asked."""

import json
from typing import Any

import msgspec

from antiphon.backends.base import Capabilities, Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from antiphon.protocol import codec
from antiphon.stream.deltas import Deltas


class Recorder(ScriptedBackend):
    """One of `only_functions` knows no other tools."""

    def __init__(self, script: dict[str, Any], *, only_functions: bool = False) -> None:
        super().__init__("scripted", msgspec.json.decode(msgspec.json.encode(script), type=Script))
        self.turns: list[Turn] = []
        if only_functions:
            self.capabilities = Capabilities(tools=frozenset({"function"}))

    async def stream(self, turn: Turn) -> Deltas:
        self.turns.append(turn)
        return await super().stream(turn)

    def asked(self) -> list[list[dict[str, Any]]]:
        """The items of every turn, as they are on the wire."""
        return [[json.loads(codec.encode(item)) for item in turn.items] for turn in self.turns]

    def last_item(self, kind: str) -> dict[str, Any]:
        return [item for item in self.asked()[-1] if item.get("type", "message") == kind][-1]
