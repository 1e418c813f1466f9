"""A session in a conversation of a Responses API server, or of an engine in this process."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec

from antiphon.agent.history import ENCRYPTED_REASONING, to_input_item
from antiphon.agent.transports.base import check_base_url
from antiphon.agent.transports.sessions import LoopSessions, read_all
from antiphon.errors import ConfigError, UpstreamError
from antiphon.ledger import Lease
from antiphon.protocol import codec
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.session import WAIT_SECONDS, LocalLeases, Trim, apply_trim, check_items, check_trim

# The API accepts no more items in one request.
_MAX_ADDED = 20
_PAGE_SIZE = 100
_CONNECT_TIMEOUT_SECONDS = 10.0
_TIMEOUT_SECONDS = 60.0

Order = Literal["asc", "desc"]


class ConversationEngine(Protocol):
    """The part of an engine that a session uses. The owner of the engine starts and closes it."""

    @property
    def conversations(self) -> Any: ...

    @property
    def reasoning(self) -> Any: ...


class ConversationSession:
    """A session in a conversation. `base_url` is the address of a server; an `engine` is used instead of one.

    The runs of this process hold the session one after the other. Runs of other processes do not wait, because servers
    have no leases: their items follow one another, but a run may not have read those of another. A run stores its items
    when it ends with an answer. `trim` selects the items that a run reads.
    """

    appends_only = True

    def __init__(
        self,
        conversation_id: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        engine: ConversationEngine | None = None,
        project: str = "default",
        trim: Trim | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        if not conversation_id:
            raise ConfigError("conversation_id: a session needs the id of a conversation.")
        self._conversations = _connect(base_url, api_key, headers, engine, project)
        self.session_id = conversation_id
        self.wait_seconds = wait_seconds
        self._trim = check_trim(trim)
        self._leases = _find_leases(self._conversations.address, conversation_id)

    @classmethod
    async def create(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        engine: ConversationEngine | None = None,
        project: str = "default",
        metadata: Mapping[str, str] | None = None,
        trim: Trim | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> "ConversationSession":
        """Create a conversation and return a session in it."""
        conversations = _connect(base_url, api_key, headers, engine, project)
        try:
            conversation_id = await conversations.create(dict(metadata or {}))
        finally:
            await conversations.close()
        return cls(
            conversation_id,
            base_url=base_url,
            api_key=api_key,
            headers=headers,
            engine=engine,
            project=project,
            trim=trim,
            wait_seconds=wait_seconds,
        )

    async def load(self) -> list[JsonObject]:
        return await apply_trim(self._trim, await self.list_items())

    async def save_run(self, run_id: str, items: Sequence[JsonObject]) -> None:
        await self.add_items(items)

    async def list_items(self, *, limit: int | None = None) -> list[JsonObject]:
        items: list[JsonObject] = []
        after: str | None = None
        while limit is None or len(items) < limit:
            size = _PAGE_SIZE if limit is None else min(_PAGE_SIZE, limit - len(items))
            page = await self._conversations.list_page(self.session_id, after=after, limit=size, order="desc")
            items += [_require_item(item) for item in page.get("data") or ()]
            after = page.get("last_id")
            if not page.get("has_more") or not after:
                break
        return [to_input_item(item) for item in reversed(items)]

    async def add_items(self, items: Sequence[JsonObject]) -> None:
        checked = check_items(items)
        for start in range(0, len(checked), _MAX_ADDED):
            await self._conversations.add(self.session_id, list(checked[start : start + _MAX_ADDED]))

    async def pop_item(self) -> JsonObject | None:
        page = await self._conversations.list_page(self.session_id, after=None, limit=1, order="desc")
        items = [_require_item(item) for item in page.get("data") or ()]
        if not items:
            return None
        await self._conversations.delete(self.session_id, str(items[0].get("id")))
        return to_input_item(items[0])

    async def clear(self) -> None:
        while await self.pop_item() is not None:
            pass

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        return await self._leases.hold(run_id, owner, seconds, instead_of=instead_of)

    async def release(self, run_id: str, owner: str) -> None:
        await self._leases.release(run_id, owner)

    async def find_lease(self, run_id: str) -> Lease | None:
        return await self._leases.find_lease(run_id)

    async def close(self) -> None:
        """Release the connections of this event loop."""
        await self._conversations.close()


class _Conversations(Protocol):
    """Operations on conversations, with items as JSON."""

    @property
    def address(self) -> str:
        """A name of the server. Sessions with the same one share their leases."""

    async def create(self, metadata: dict[str, str]) -> str: ...

    async def list_page(self, conversation_id: str, *, after: str | None, limit: int, order: Order) -> JsonObject: ...

    async def add(self, conversation_id: str, items: list[JsonObject]) -> None: ...

    async def delete(self, conversation_id: str, item_id: str) -> None: ...

    async def close(self) -> None: ...


class _HttpConversations:
    """The conversations of a server."""

    def __init__(self, base_url: str, api_key: str | None, headers: Mapping[str, str] | None) -> None:
        base, _, query = base_url.partition("?")
        self.address = base.rstrip("/")
        self._query = query
        self._sessions = LoopSessions(
            self.address,
            api_key=api_key,
            headers={"Accept": "application/json", **(headers or {})},
            connect_timeout=_CONNECT_TIMEOUT_SECONDS,
        )

    async def create(self, metadata: dict[str, str]) -> str:
        created = await self._send("POST", "/conversations", {"metadata": metadata})
        if not isinstance(created.get("id"), str):
            raise UpstreamError("The server sent a conversation without an id.")
        return str(created["id"])

    async def list_page(self, conversation_id: str, *, after: str | None, limit: int, order: Order) -> JsonObject:
        query = f"limit={limit}&order={order}&include[]={ENCRYPTED_REASONING}"
        if after is not None:
            query += f"&after={quote(after, safe='')}"
        return await self._send("GET", f"{_make_path(conversation_id)}/items", query=query)

    async def add(self, conversation_id: str, items: list[JsonObject]) -> None:
        await self._send("POST", f"{_make_path(conversation_id)}/items", {"items": items})

    async def delete(self, conversation_id: str, item_id: str) -> None:
        await self._send("DELETE", f"{_make_path(conversation_id)}/items/{quote(item_id, safe='')}")

    async def close(self) -> None:
        await self._sessions.close()

    async def _send(self, method: str, path: str, body: JsonObject | None = None, *, query: str = "") -> JsonObject:
        joined = "&".join(each for each in (self._query, query) if each)
        loop = asyncio.get_running_loop()
        headers = None if body is None else {"Content-Type": "application/json"}
        response = await self._sessions.open().send(
            method,
            f"{path}?{joined}" if joined else path,
            None if body is None else codec.encode(body),
            headers,
            deadline=loop.time() + _TIMEOUT_SECONDS,
        )
        try:
            payload = await read_all(response)
        finally:
            response.close()
        try:
            return _require_item(read_json(payload))
        except msgspec.DecodeError:
            raise UpstreamError("The server sent a conversation that is not JSON.") from None


class _EngineConversations:
    """The conversations of an engine in this process."""

    def __init__(self, engine: ConversationEngine, project: str) -> None:
        self.address = f"engine {id(engine)} {project}"
        self._engine = engine
        self._project = project

    async def create(self, metadata: dict[str, str]) -> str:
        created = await self._engine.conversations.create(self._project, (), metadata)
        return str(created.id)

    async def list_page(self, conversation_id: str, *, after: str | None, limit: int, order: Order) -> JsonObject:
        page = await self._engine.conversations.list_items(
            self._project, conversation_id, after=after, limit=limit, order=order
        )
        sealed = self._engine.reasoning.seal_page(page, project=self._project)
        return _require_item(msgspec.json.decode(codec.encode(sealed)))

    async def add(self, conversation_id: str, items: list[JsonObject]) -> None:
        decoded = codec.decode_add_items(codec.encode({"items": items})).body
        await self._engine.conversations.add_items(self._project, conversation_id, decoded.items)

    async def delete(self, conversation_id: str, item_id: str) -> None:
        await self._engine.conversations.delete_item(self._project, conversation_id, item_id)

    async def close(self) -> None:
        """Do nothing: the owner closes the engine."""


_leases: WeakValueDictionary[tuple[str, str], LocalLeases] = WeakValueDictionary()


def _find_leases(address: str, conversation_id: str) -> LocalLeases:
    """Return the leases that all sessions of this process in one conversation share."""
    return _leases.setdefault((address, conversation_id), LocalLeases())


def _connect(
    base_url: str | None,
    api_key: str | None,
    headers: Mapping[str, str] | None,
    engine: ConversationEngine | None,
    project: str,
) -> _Conversations:
    if (base_url is None) is (engine is None):
        raise ConfigError("A conversation session requires either a base_url or an engine.")
    if engine is not None:
        return _EngineConversations(engine, project)
    assert base_url is not None
    check_base_url(base_url)
    return _HttpConversations(base_url, api_key, headers)


def _make_path(conversation_id: str) -> str:
    return f"/conversations/{quote(conversation_id, safe='')}"


def _require_item(value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise UpstreamError("The server sent a malformed conversation.")
    return value
