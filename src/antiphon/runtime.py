"""Agents without a server: the engine of the settings, started in this process when the first request needs it."""

import asyncio
from typing import TYPE_CHECKING, Any

from antiphon.agent import agent
from antiphon.agent.transport import Events, Transport

if TYPE_CHECKING:
    from antiphon.engine.engine import Engine


class InProcess:
    """A transport that brings its own engine: started at the first request, closed with the transport."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[Engine] | None = None

    async def stream(self, request: dict[str, Any]) -> Events:
        from antiphon.agent.local import LocalTransport

        if self._starting is None or _has_failed(self._starting):
            self._starting = asyncio.ensure_future(_start())
        # Several requests may wait for it: one that is cancelled must not take it from the others.
        engine = await asyncio.shield(self._starting)
        return await LocalTransport(engine).stream(request)

    async def close(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None and not _has_failed(starting):
            await (await starting).close()


def _has_failed(starting: "asyncio.Task[Engine]") -> bool:
    return starting.done() and starting.exception() is not None


async def _start() -> "Engine":
    # An engine takes longer to load than an agent that talks to a server should have to wait.
    from antiphon.config import environment, load
    from antiphon.engine.assemble import build_engine

    engine = build_engine(load(None, environment(), {}))
    await engine.start()
    return engine


class Agent(agent.Agent):
    __doc__ = f"""{agent.Agent.__doc__}
    Without a `base_url` or a `transport`, the model runs in this process, as the settings say.
    """

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        return InProcess() if base_url is None else super()._connect(base_url, api_key)
