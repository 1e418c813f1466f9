"""Tools of an agent that the server of its model runs. Each object describes one entry of a request's `tools`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from antiphon.protocol.json_text import JsonObject


class ServerTool(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the tools that the server runs. Fields that are not set are left to the server."""

    @property
    def type(self) -> str:
        """The type of the tool in a request."""
        raise NotImplementedError

    def describe(self) -> JsonObject:
        """Return the entry of the request's `tools`."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {"type": self.type} | {name: value for name, value in fields.items() if value is not None}


class FileSearch(ServerTool, frozen=True, kw_only=True):
    """Searches vector stores."""

    vector_store_ids: Sequence[str]
    max_num_results: int | None = None
    filters: Mapping[str, Any] | None = None
    ranking_options: Mapping[str, Any] | None = None

    @property
    def type(self) -> str:
        return "file_search"


class CodeInterpreter(ServerTool, frozen=True, kw_only=True):
    """Runs Python code in a container: the id of one, or options of a new one."""

    container: str | Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "auto"})

    @property
    def type(self) -> str:
        return "code_interpreter"


class WebSearch(ServerTool, frozen=True, kw_only=True):
    """Searches the web."""

    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: Mapping[str, Any] | None = None
    filters: Mapping[str, Any] | None = None

    @property
    def type(self) -> str:
        return "web_search"


class Mcp(ServerTool, frozen=True, kw_only=True):
    """Calls the tools of an MCP server. Without a URL, `server_label` names a server of the settings.

    An agent cannot answer approval requests, so no call needs an approval unless `require_approval` is set.
    """

    server_label: str
    server_url: str | None = None
    connector_id: str | None = None
    authorization: str | None = None
    headers: Mapping[str, str] | None = None
    server_description: str | None = None
    allowed_tools: Sequence[str] | Mapping[str, Any] | None = None
    require_approval: str | Mapping[str, Any] | None = "never"
    defer_loading: bool | None = None

    @property
    def type(self) -> str:
        return "mcp"

    def __repr__(self) -> str:
        return f"Mcp(server_label={self.server_label!r})"  # headers and tokens are secrets
