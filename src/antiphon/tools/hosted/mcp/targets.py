"""The server of an `mcp` tool: one that the request names by URL, or one of the settings."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from antiphon.config.tools import McpServerSettings
from antiphon.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from antiphon.protocol.tools import McpTool
from antiphon.tools.mcp_connection import Connect, connect_http, connect_sse, connect_stdio
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.options import is_header_value

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,256}")
# Only the keyed digest of credentials is part of a key, so that a key can be logged.
_DIGEST_KEY = secrets.token_bytes(16)

McpServers = Mapping[str, McpServerSettings]


class McpTarget(Struct, frozen=True, kw_only=True):
    """A server to connect to. Targets with the same `key` share a connection.

    `secrets` are the strings that must not appear in a text for clients. `timeout` is for one call, in seconds.
    """

    label: str
    key: tuple[str, ...]
    transports: Sequence[Connect]
    secrets: frozenset[str] = frozenset()
    timeout: float
    description: str | None = None


def find_target(
    tool: McpTool, path: str, *, servers: McpServers, rules: OutboundRules, project: str, timeout: float
) -> McpTarget:
    """Return the server of a tool. `path` is the tool's param path. Raises InvalidRequest."""
    if tool.tunnel_id is not None:
        raise UnsupportedParameter("This server supports no tunnels to MCP servers.", param=f"{path}.tunnel_id")
    if not tool.server_label:
        raise InvalidRequest(
            f"'{path}.server_label' must not be empty.", param=f"{path}.server_label", code="invalid_value"
        )
    headers = _read_headers(tool, path)
    if tool.server_url is not None:
        if tool.connector_id is not None:
            raise InvalidRequest(
                f"Set either '{path}.server_url' or '{path}.connector_id'.", param=path, code="invalid_value"
            )
        rules.check(tool.server_url, f"{path}.server_url", allow_data=False)
        return McpTarget(
            label=tool.server_label,
            key=("url", project, tool.server_url, _digest(headers)),
            transports=[make(tool.server_url, headers, rules) for make in (connect_http, connect_sse)],
            secrets=_collect_secrets(headers, {"password": _read_password(tool.server_url, f"{path}.server_url")}),
            timeout=timeout,
            description=tool.server_description,
        )
    name = tool.connector_id or tool.server_label
    settings = servers.get(name)
    if settings is not None:
        return _make_operator_target(tool, path, name, settings, headers, timeout)
    if tool.connector_id is not None:
        known = ", ".join(sorted(servers)) or "none"
        raise InvalidRequest(
            f"Invalid '{path}.connector_id': this server has no connector '{tool.connector_id}'. It has: {known}.",
            param=f"{path}.connector_id",
            code="invalid_value",
        )
    raise MissingParameter(
        f"Missing required parameter: '{path}.server_url'. This server has no MCP server named '{tool.server_label}'.",
        param=f"{path}.server_url",
    )


def _make_operator_target(
    tool: McpTool, path: str, name: str, settings: McpServerSettings, headers: Mapping[str, str], timeout: float
) -> McpTarget:
    own = dict(settings.headers)
    if settings.authorization is not None:
        own["Authorization"] = f"Bearer {settings.authorization}"
    if settings.url is None:
        if headers:
            raise InvalidRequest(
                f"The MCP server '{name}' is a program of this server and takes no headers.",
                param=f"{path}.headers" if tool.headers else f"{path}.authorization",
                code="invalid_value",
            )
        assert settings.command is not None
        transports = [connect_stdio(settings.command, settings.args, settings.env, None)]
    else:
        own |= headers
        transports = [connect_http(settings.url, own), connect_sse(settings.url, own)]
    return McpTarget(
        label=tool.server_label,
        key=("settings", name, _digest(headers)),
        transports=transports,
        secrets=_collect_secrets(own, settings.env),
        timeout=settings.timeout or timeout,
        description=tool.server_description or settings.description,
    )


def _read_headers(tool: McpTool, path: str) -> dict[str, str]:
    headers = dict(tool.headers or {})
    for name, value in headers.items():
        # The value is a secret and does not belong into the message.
        if not _HEADER_NAME.fullmatch(name) or not (value == "" or is_header_value(value)):
            raise InvalidRequest(
                f"Invalid '{path}.headers': a header needs a valid name and one line of ASCII text.",
                param=f"{path}.headers",
                code="invalid_value",
            )
    if tool.authorization is not None:
        if not is_header_value(tool.authorization):
            raise InvalidRequest(
                f"Invalid '{path}.authorization': expected one line of ASCII text.",
                param=f"{path}.authorization",
                code="invalid_value",
            )
        headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        headers["Authorization"] = f"Bearer {tool.authorization}"
    return headers


def _read_password(url: str, param: str) -> str:
    try:
        return unquote(urlsplit(url).password or "")
    except ValueError:
        raise InvalidRequest(f"Invalid '{param}': the URL is malformed.", param=param, code="invalid_value") from None


def _collect_secrets(*sources: Mapping[str, str]) -> frozenset[str]:
    """Return the values of headers or variables, and the parts of values such as `Bearer KEY`."""
    values = {value for source in sources for value in source.values()}
    return frozenset(values | {value.partition(" ")[2].strip() for value in values}) - {""}


def _digest(headers: Mapping[str, str]) -> str:
    if not headers:
        return ""
    text = repr(sorted((name.lower(), value) for name, value in headers.items()))
    return hmac.new(_DIGEST_KEY, text.encode(), hashlib.sha256).hexdigest()
