import asyncio
from typing import Any

import pytest

from antiphon.errors import UpstreamError, UpstreamTimeout
from antiphon.stream.deltas import Finish, Text
from support.upstream_server import STALL, Raw, stream_of

MOMENT = 0.05


async def test_a_body_ends_when_nonsense_comes_instead_of_it(connect: Any) -> None:
    more = asyncio.Event()
    async with connect(stream_of(b"data: a\n\n", more, Raw(b"this is no chunk\r\n"), STALL)) as line:
        deltas = await line.begin()
        assert await anext(deltas) == [Text("a")]
        more.set()
        with pytest.raises(UpstreamError, match="before the answer ended"):
            await anext(deltas)


async def test_only_the_servers_silence_counts_and_not_the_readers(connect: Any) -> None:
    stalled = stream_of(b"data: x\n\n", STALL)
    pauses = [asyncio.Event(), asyncio.Event()]
    slow_answer = stream_of(b"data: a\n\n", pauses[0], b"data: b\n\n", pauses[1], b"data: [DONE]\n\n")
    async with connect(slow_answer, stalled, stalled, stalled, idle_timeout=MOMENT) as line:
        slow = await line.begin()
        assert await anext(slow) == [Text("a")]
        pauses[0].set()
        assert await anext(slow) == [Text("b")]  # its clock runs from here
        for _ in range(3):  # each takes as long as a server may be silent
            other = await line.begin()
            assert await anext(other) == [Text("x")]
            with pytest.raises(UpstreamTimeout, match="stopped sending"):
                await anext(other)
        pauses[1].set()
        assert await anext(slow) == [Finish()]
        await slow.aclose()
