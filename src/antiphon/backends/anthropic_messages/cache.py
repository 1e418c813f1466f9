"""Which beginnings of a request the upstream is to remember: this API caches only up to blocks that are marked."""

from collections.abc import Iterator
from typing import Any

from antiphon.protocol.request import CreateRequest

Json = dict[str, Any]

MOST_MARKS = 4


def mark(body: Json, request: CreateRequest) -> None:
    """Mark the body's blocks: those that the request marks itself, and where it asks for caching, the usual places.

    The API wants the long-lived marks before the others, so all get the longest time that any of them asks for.
    """
    own = [block for block in _list_content(body) if "cache_control" in block]
    chosen = own[-MOST_MARKS:]
    if _wants_marks(request):
        for block in _list_usual(body):
            if len(chosen) < MOST_MARKS and all(block is not each for each in chosen):
                chosen.append(block)
    asked = {block.pop("cache_control")["ttl"] for block in own}
    long = _lasts_long(request) or "1h" in asked
    for block in chosen:
        block["cache_control"] = {"type": "ephemeral", "ttl": "1h"} if long else {"type": "ephemeral"}


def _wants_marks(request: CreateRequest) -> bool:
    options = request.prompt_cache_options
    if options is not None and options.mode == "explicit":
        return False
    return bool(request.prompt_cache_key or request.prompt_cache_retention or options)


def _lasts_long(request: CreateRequest) -> bool:
    options = request.prompt_cache_options
    return request.prompt_cache_retention == "24h" or (options is not None and options.ttl == "12h")


def _list_content(body: Json) -> Iterator[Json]:
    yield from body.get("system", ())
    for message in body["messages"]:
        yield from (block for block in message["content"] if isinstance(block, dict))


def _list_usual(body: Json) -> Iterator[Json]:
    """The ends of the instructions, of the tools, of what is new, and of what was new the last time."""
    for name in ("system", "tools"):
        if body.get(name):
            yield body[name][-1]
    said = [message for message in body["messages"] if message["role"] == "user"]
    for message in reversed(said[-2:]):
        yield message["content"][-1]
