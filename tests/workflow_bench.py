"""Engines whose background responses DBOS hands out, and what it says of them."""

import asyncio
from collections.abc import Awaitable, Callable

from dbos import DBOS, error

from antiphon.protocol import codec
from engine_bench import Bench, judge

SLOW = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}
DONE = ("completed", "so far and on")

Start = Callable[..., Awaitable[Bench]]


async def ask(bench: Bench, asked: str = "hi", project: str = "default") -> str:
    """The id of a new background response."""
    run = await bench.ask(asked, project=project, background=True)
    return run.response.id


async def finish(bench: Bench, response_id: str, project: str = "default") -> tuple[str, str]:
    """How a response ends, and with which words."""
    batches = await bench.engine.follow(project, response_id, after=-1)
    response = judge([codec.decode_event(event.raw) async for batch in batches for event in batch])
    return response.status, response.output_text


async def wait_until(happens: Callable[[], Awaitable[bool]]) -> None:
    """For what DBOS can only be asked for again and again."""
    for _ in range(3000):
        if await happens():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def list_statuses(response_id: str) -> list[str]:
    """What DBOS says of a workflow. There may be no DBOS, which knows of nothing."""
    try:
        found = await asyncio.to_thread(DBOS.list_workflows, workflow_ids=[response_id])
    except error.DBOSException:
        return []
    return [workflow.status for workflow in found]


async def wait_for_status(response_id: str, status: str) -> None:
    async def has_status() -> bool:
        return await list_statuses(response_id) == [status]

    await wait_until(has_status)
