"""Agents without a server: the engine of the settings, started in this process when the first request needs it."""

from typing import Any

from antiphon.agent import agent
from antiphon.agent.local import LocalTransport
from antiphon.agent.transport import Events, Transport
from antiphon.config import environment, load
from antiphon.engine.assemble import build_engine
from antiphon.engine.engine import Engine


class InProcess:
    """A transport that brings its own engine: started at the first request, closed with the transport."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    async def stream(self, request: dict[str, Any]) -> Events:
        if self._engine is None:
            engine = build_engine(load(None, environment(), {}))
            await engine.start()
            self._engine = engine
        return await LocalTransport(self._engine).stream(request)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


class Agent(agent.Agent):
    __doc__ = f"""{agent.Agent.__doc__}
    Without a `base_url` or a `transport`, the model runs in this process, as the settings say.
    """

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        return InProcess() if base_url is None else super()._connect(base_url, api_key)
