"""What a reference to an item finds, in memory."""

from collections.abc import Sequence

from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.store.memory.tables import Key, Memory
from antiphon.store.record import Foreign, pick_item, unpack_items, unpack_output


class References(Memory):
    async def load_outputs(self, project: str, response_ids: Sequence[str]) -> list[Item | Unknown]:
        found = (self._tables.responses.get((project, each)) for each in response_ids)
        live = (record for record in found if record is not None and self._is_live(record))
        return [item for record in live for item in unpack_output(record.id, record.output)]

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

    def _note_items(self, key: Key, foreign: list[Foreign]) -> None:
        """Note the foreign items of a response that has just been written, in the place of those it had before.

        What was made in a response that is kept is found there, and goes with it.
        """
        project, _ = key
        responses = self._tables.responses
        self._tables.foreign[key] = frozenset(
            each.item_id for each in foreign if each.owner is None or (project, each.owner) not in responses
        )
