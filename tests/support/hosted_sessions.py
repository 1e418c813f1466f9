"""Hosted tools without the loop: open a session, and compose its deltas into events."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from antiphon.config.settings import Settings
from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Delta, Finish
from antiphon.tools.hosted.base import HostedCall, HostedContext, HostedServices, HostedSession
from antiphon.upstream.addresses import OutboundRules

LOOPBACK = OutboundRules.parse(["127.0.0.1"])
TIMEOUT = 20


class Claims:
    """The claims of all responses, in memory."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, str]] = set()

    async def claim(self, project: str, key: str) -> bool:
        is_new = (project, key) not in self.keys
        self.keys.add((project, key))
        return is_new

    @property
    def services(self) -> HostedServices:
        return HostedServices(claim=self.claim)


def make_settings(**settings: Any) -> Settings:
    return Settings(data_dir=Path("unused"), store="memory:", **settings)


def make_context(
    tools: Iterable[dict[str, Any]],
    items: Sequence[Item | Unknown] = (),
    *,
    response_id: str = "resp_1",
    rules: OutboundRules = LOOPBACK,
    claims: Claims | None = None,
    has_begun: bool = False,
    **request: Any,
) -> HostedContext:
    """Return the context of a request with these tools. `items` are its context before the input."""
    fields = {"model": "m", "input": [], "tools": list(tools)} | request
    decoded = codec.decode_request(msgspec.json.encode(fields)).body
    sent = decoded.input if isinstance(decoded.input, list) else []
    return HostedContext(
        project="p",
        response_id=response_id,
        request=decoded,
        items=[*items, *sent],
        outbound=rules,
        warn=lambda _: None,
        services=(claims or Claims()).services,
        has_begun=lambda: has_begun,
    )


async def collect(batches: AsyncIterator[Sequence[Delta]]) -> list[Delta]:
    async with asyncio.timeout(TIMEOUT):
        return [delta async for batch in batches for delta in batch]


async def run_call(session: HostedSession, name: str, arguments: str, key: str = "c1") -> list[Delta]:
    return await run_begun(session.begin(name, key), arguments)


async def run_begun(call: HostedCall, arguments: str) -> list[Delta]:
    return await collect(call.run(arguments))


def compose(deltas: Sequence[Delta]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the events of the items, and the output of the response."""
    numbers = count(1)
    composer = Composer(
        Response(id="resp_1", created_at=0, model="m"), new_id=lambda prefix: f"{prefix}_{next(numbers)}", now=int
    )
    events = [*composer.start(), *composer.compose([*deltas, Finish()])]
    decoded = [msgspec.json.decode(codec.encode(event)) for event in events]
    return [event for event in decoded if "response" not in event], decoded[-1]["response"]["output"]


def list_types(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]
