"""Fields of hosted items that clients get only if `include` names them. They are always stored."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from antiphon.engine.background.event_reader import EventPage
from antiphon.engine.items import ItemPage
from antiphon.protocol import codec
from antiphon.protocol.events import TERMINAL, Event, OutputItemAdded, OutputItemDone
from antiphon.protocol.hosted import CodeInterpreterCall, FileSearchCall, WebSearchCall
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.tools import (
    CodeInterpreterTool,
    FileSearchTool,
    WebSearchPreviewTool,
    WebSearchPreviewTool20250311,
    WebSearchTool,
    WebSearchTool20250826,
)
from antiphon.protocol.unions import Unknown
from antiphon.server.dialect import OutputDialect

_TAGS = (b'"file_search_call"', b'"code_interpreter_call"', b'"web_search_call"')
_EVENT_TYPES = (OutputItemAdded, OutputItemDone, *TERMINAL)


def _hide_sources(item: WebSearchCall) -> WebSearchCall:
    if item.action is None or "sources" not in item.action:
        return item
    action = {name: value for name, value in item.action.items() if name != "sources"}
    return msgspec.structs.replace(item, action=action)


# The value of `include` that shows a field, and the function that hides it.
_HIDDEN: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (FileSearchCall, "file_search_call.results", lambda item: msgspec.structs.replace(item, results=None)),
    (CodeInterpreterCall, "code_interpreter_call.outputs", lambda item: msgspec.structs.replace(item, outputs=None)),
    (WebSearchCall, "web_search_call.action.sources", _hide_sources),
    (WebSearchCall, "web_search_call.results", lambda item: msgspec.structs.replace(item, results=None)),
)
# Tools whose calls have such fields.
_TOOL_TYPES = frozenset(
    {
        FileSearchTool,
        CodeInterpreterTool,
        WebSearchTool,
        WebSearchTool20250826,
        WebSearchPreviewTool,
        WebSearchPreviewTool20250311,
    }
)


def add_include(dialect: OutputDialect, response: Response, include: Collection[str] | None) -> OutputDialect:
    """Return the dialect for a new response. It hides fields only if the response has tools with such fields."""
    if not response.tools or _TOOL_TYPES.isdisjoint(map(type, response.tools)):
        return dialect
    return IncludeFilter(include).adapt(dialect)


class IncludeFilter:
    """Hides the fields that a request does not include. Nothing is changed in place."""

    def __init__(self, include: Collection[str] | None) -> None:
        included = include or ()
        self._hide: dict[type, list[Callable[[Any], Any]]] = {}
        for kind, name, hide in _HIDDEN:
            if name not in included:
                self._hide.setdefault(kind, []).append(hide)

    def adapt(self, dialect: OutputDialect) -> OutputDialect:
        """Return the dialect, for events and responses that are filtered first."""
        adapt_events, adapt_response = dialect.adapt_events, dialect.adapt_response
        return msgspec.structs.replace(
            dialect,
            adapt_events=lambda batch: adapt_events(self.filter_events(batch)),
            adapt_response=lambda response: adapt_response(self.filter_response(response)),
        )

    def filter_item(self, item: Item | Unknown) -> Item | Unknown:
        for hide in self._hide.get(type(item), ()):
            item = hide(item)
        return item

    def filter_items(self, items: Sequence[Item | Unknown]) -> list[Item | Unknown]:
        if self._hide.keys().isdisjoint(map(type, items)):
            return list(items)
        return [self.filter_item(item) for item in items]

    def filter_page(self, page: ItemPage) -> ItemPage:
        if self._hide.keys().isdisjoint(map(type, page.data)):
            return page
        return msgspec.structs.replace(page, data=self.filter_items(page.data))

    def filter_response(self, response: Response) -> Response:
        if self._hide.keys().isdisjoint(map(type, response.output)):
            return response
        return msgspec.structs.replace(response, output=self.filter_items(response.output))

    def filter_events(self, batch: Sequence[Event | Unknown]) -> Sequence[Event | Unknown]:
        """Return the events without hidden fields: the same object if there are none."""
        if isinstance(batch, EventPage):
            # One search in a page that many followers share is much faster than one in each of its events.
            may_hide = _has_tag(batch.encode())
        else:
            may_hide = any(self._may_hide(event) for event in batch)
        if not may_hide:
            return batch
        return [self._filter_event(event) for event in batch]

    def _may_hide(self, event: Event | Unknown) -> bool:
        if isinstance(event, Unknown):  # an event of the event log
            return _has_tag(event.raw)
        return isinstance(event, _EVENT_TYPES)

    def _filter_event(self, event: Event | Unknown) -> Event | Unknown:
        decoded = event
        if isinstance(event, Unknown):
            decoded = codec.decode_event(event.raw) if self._may_hide(event) else event
        if isinstance(decoded, OutputItemAdded | OutputItemDone):
            item = self.filter_item(decoded.item)
            return event if item is decoded.item else msgspec.structs.replace(decoded, item=item)
        if isinstance(decoded, TERMINAL):
            response = self.filter_response(decoded.response)
            return event if response is decoded.response else msgspec.structs.replace(decoded, response=response)
        return event


def _has_tag(data: bytes | msgspec.Raw) -> bool:
    return any(tag in data for tag in _TAGS)
