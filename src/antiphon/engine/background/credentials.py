"""Credentials of MCP servers in queued requests. They are in memory only, never in the store.

The process that accepts a background response usually runs it too. Another process, or this one after a restart, runs
it without the credentials, and the MCP server refuses its requests.
"""

from collections import OrderedDict

import msgspec

from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import Tool, has_credentials, hide_credentials
from antiphon.protocol.unions import Unknown
from antiphon.store.base import RunKey

MAX_REQUESTS = 10_000


class QueuedCredentials:
    """The tools with credentials of queued requests. The oldest are dropped if there are too many."""

    def __init__(self) -> None:
        self._tools: OrderedDict[RunKey, list[Tool | Unknown]] = OrderedDict()

    def withhold(self, key: RunKey, request: CreateRequest) -> CreateRequest:
        """Return the request as it may be stored."""
        if request.tools is None or not has_credentials(request.tools):
            return request
        stored = [hide_credentials(tool) for tool in request.tools]
        if all(one is other for one, other in zip(stored, request.tools, strict=True)):
            return request
        self._tools[key] = request.tools
        if len(self._tools) > MAX_REQUESTS:
            self._tools.popitem(last=False)
        return msgspec.structs.replace(request, tools=stored)

    def restore(self, key: RunKey, request: CreateRequest) -> CreateRequest:
        """Return a stored request with its credentials, if this process has them."""
        tools = self._tools.get(key)
        return request if tools is None else msgspec.structs.replace(request, tools=tools)

    def forget(self, key: RunKey) -> None:
        self._tools.pop(key, None)
