"""An engine on the scripted backend, and the words to talk to it: what the engine's tests share."""

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
from antiphon.store.base import Store
from antiphon.stream.fold import fold
from support import openresponses


class Bench:
    """A started engine with its script's backend and its store at hand."""

    def __init__(self, script: dict[str, Any], store: Store, policy: Policy | None = None) -> None:
        self.backend: ScriptedBackend = create_scripted("test", {"script": script}, Path())
        self.store = store
        # One server has one key, in all its processes.
        sealer = Sealer([bytes(32)])
        self.engine = Engine(backends={"test": self.backend}, store=store, policy=policy, sealer=sealer)

    async def ask(self, asked: Any = "hi", *, project: str = "default", **fields: Any) -> Run:
        body = codec.encode({"model": "scripted", "input": asked} | fields)
        return await self.engine.create(codec.decode_request(body).request, project=project)

    async def answer(self, asked: Any = "hi", *, project: str = "default", **fields: Any) -> Response:
        """The final response, after its whole stream was judged."""
        run = await self.ask(asked, project=project, **fields)
        return judge([event async for batch in run.events() for event in batch])


def judge(stream: Sequence[Event | Unknown]) -> Response:
    """Every stream of these tests is legal, and within Open Responses if what it tells is."""
    response = fold(stream)
    if response.status != "cancelled":
        openresponses.validate_response(json.loads(codec.encode(response)))
    for event in stream:
        if not isinstance(event, Unknown) and event.type in openresponses.event_schemas():
            openresponses.validate_event(json.loads(codec.encode(event)))
    return response
