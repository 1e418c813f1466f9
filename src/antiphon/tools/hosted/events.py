"""Events of hosted items, as deltas."""

from typing import Any

import msgspec

from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import ItemPassthrough


def make_item_event(key: str, kind: str, **fields: Any) -> ItemPassthrough:
    """Return an event about an open item. The composer sets the ids and numbers."""
    placeholders = {"type": f"response.{kind}", "sequence_number": 0, "output_index": 0, "item_id": ""}
    return ItemPassthrough(Unknown(msgspec.json.encode(placeholders | fields)), key)
