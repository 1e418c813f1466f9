"""The ids of the items and calls of one response."""

from collections.abc import Callable

from antiphon.protocol.items import OutputItem
from antiphon.protocol.unions import Unknown
from antiphon.stream.closed_items import make_call_id
from antiphon.stream.passthrough import ID_PREFIXES, PassthroughDraft, get_call_id, replace_ids


class CallIds:
    """The call ids of one response. Each output refers to one call."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def assign_ids(self, item: OutputItem | Unknown, new_id: Callable[[str], str]) -> OutputItem | Unknown:
        """Add missing ids, and replace a call id that another call of this response already has."""
        item_id = item.id
        if not item_id and not isinstance(item, Unknown):
            item_id = new_id(ID_PREFIXES.get(item.type, PassthroughDraft.prefix))
        given = get_call_id(item)
        call_id = self.resolve(item, given, item_id)
        return item if (item_id, call_id) == (item.id, given) else replace_ids(item, item_id, call_id)

    def resolve(self, item: OutputItem | Unknown, given: str | None, item_id: str | None) -> str | None:
        """Return the call id for this item: the id of an earlier call for an output, else a new one."""
        if given is None:
            return None
        if item.type.endswith("_output"):
            return self._given.get(given, given)
        return self.reserve(given or make_call_id(item_id or ""))

    def reserve(self, given: str) -> str:
        """Reserve a call id that is unique in this response."""
        call_id, number = given, len(self._given)
        while call_id in self._given:
            number += 1
            call_id = f"{given}_{number}"
        self._given[given] = self._given[call_id] = call_id
        return call_id
