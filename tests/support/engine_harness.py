"""An engine with the scripted backend, and helpers to send requests to it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.backend import create as create_scripted
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.engine.respond.run import Run
from antiphon.engine.sealing import Sealer
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.server.dialect import choose_dialect
from antiphon.store.base import Store
from antiphon.stream.fold import fold
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS, HostedTools
from support import openresponses

OPEN_RESPONSES = choose_dialect({}, "open-responses")


class EngineHarness:
    """An engine with its scripted backend and its store."""

    def __init__(
        self,
        script: dict[str, Any],
        store: Store,
        policy: Policy | None = None,
        hosted_tools: HostedTools = NO_HOSTED_TOOLS,
        backend: ScriptedBackend | None = None,
    ) -> None:
        self.backend: ScriptedBackend = backend or create_scripted("test", {"script": script}, Path())
        self.store = store
        # All engines have the same key, as all processes of one server do.
        sealer = Sealer([bytes(32)])
        self.engine = Engine(
            backends={"test": self.backend}, store=store, policy=policy, sealer=sealer, hosted_tools=hosted_tools
        )

    async def ask(self, input_items: Any = "hi", *, project: str = "default", **fields: Any) -> Run:
        body = codec.encode({"model": "scripted", "input": input_items} | fields)
        return await self.engine.create(codec.decode_request(body).body, project=project)

    async def answer(self, input_items: Any = "hi", *, project: str = "default", **fields: Any) -> Response:
        """Return the final response, after checking its whole stream."""
        run = await self.ask(input_items, project=project, **fields)
        return judge([event async for batch in run.events() for event in batch])


def judge(stream: Sequence[Event | Unknown]) -> Response:
    """Check that a stream is valid, and that its known events fit Open Responses. Return the final response."""
    response = fold(stream)
    if response.status != "cancelled":
        openresponses.validate_response(json.loads(codec.encode(OPEN_RESPONSES.adapt_response(response))))
    for event in OPEN_RESPONSES.adapt_events(stream):
        if not isinstance(event, Unknown) and event.type in openresponses.event_schemas():
            openresponses.validate_event(json.loads(codec.encode(event)))
    return response
