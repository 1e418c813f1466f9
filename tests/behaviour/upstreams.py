"""A server of ours in front of another one, of each kind: what it answers, and what it asks there."""

import asyncio
from pathlib import Path
from typing import Any

from antiphon.backends.registry import create
from behaviour.wire import Json
from live_server import Answer, Running, make_settings
from upstream_server import serve, stream_of

# Each kind of backend, and where the recorded answers of its servers are.
KINDS = {"anthropic_messages": "anthropic", "chat_completions": "chat", "responses": "responses"}
_CORPUS = Path(__file__).parents[1] / "wire"


async def ask_through(kind: str, asked: Any, **fields: Any) -> tuple[Answer, list[Json]]:
    """The answer to this input on a model behind a server of this kind, and what that server was sent."""
    reply = stream_of((_CORPUS / KINDS[kind] / "text.sse").read_bytes())
    async with serve([reply]) as upstream:
        options = {"base_url": upstream.url, "models": ["m"], "request_retries": 0, "stream_retries": 0}
        backend = create(kind, name="up", options=options, data_dir=Path("unused"))
        running = await asyncio.to_thread(Running, {}, make_settings(), others={"up": backend})
        try:
            body = {"model": "m", "input": asked} | fields
            answer = await asyncio.to_thread(running.ask, "POST", "/v1/responses", body)
        finally:
            await asyncio.to_thread(running.stop)
        return answer, [request.json for request in upstream.requests]
