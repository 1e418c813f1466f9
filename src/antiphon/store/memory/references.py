"""What a reference to an item finds, in memory."""

from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.store.memory.tables import Key, Memory
from antiphon.store.record import pick_item, unpack_items


class References(Memory):
    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        for key, record in reversed(self._tables.responses.items()):
            if key[0] == project and item_id in self._tables.foreign.get(key, ()) and self._is_live(record):
                return pick_item(item_id, record.id, record.input, record.output)
        found = [
            (row.places[item_id], conversation_id, row)
            for (owner, conversation_id), row in self._tables.conversations.items()
            if owner == project and item_id in row.places and self._is_live(row)
        ]
        if not found:
            return None
        place, conversation_id, row = max(found)
        return unpack_items(conversation_id, [row.items[place].content])[0]

    def _note_items(self, key: Key, foreign: list[str]) -> None:
        """Note the foreign items of a response that has just been written, in the place of those it had before."""
        self._tables.foreign[key] = frozenset(foreign)
