"""Conversations, and the request bodies of their endpoints."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from antiphon.protocol.items import ITEMS
from antiphon.protocol.request import Metadata
from antiphon.protocol.unions import Wire, always, union_field

MAX_NEW_ITEMS = 20

if TYPE_CHECKING:
    from antiphon.protocol.items import Item
    from antiphon.protocol.unions import Unknown

    NewItems: TypeAlias = list[Item | Unknown]
    OptionalItems: TypeAlias = list[Item | Unknown] | None
else:
    NewItems = union_field(lambda: ITEMS, many=True, max_items=MAX_NEW_ITEMS)
    OptionalItems = union_field(lambda: ITEMS, many=True, nullable=True, max_items=MAX_NEW_ITEMS)


class Conversation(Wire):
    """A stored list of items that responses read and append to."""

    id: str
    created_at: int
    metadata: Metadata | None = always(None)
    object: Literal["conversation"] = always("conversation")


class CreateConversation(Wire, kw_only=True):
    """The body of `POST /v1/conversations`."""

    items: OptionalItems = None
    metadata: Metadata | None = None

    def __post_init__(self) -> None:
        self.items = _check_length(ITEMS.decode_list_field(self.items, "items"))


class UpdateConversation(Wire, kw_only=True):
    """The body of `POST /v1/conversations/{id}`. It replaces all metadata."""

    metadata: Metadata | None


class AddItems(Wire, kw_only=True):
    """The body of `POST /v1/conversations/{id}/items`."""

    items: NewItems

    def __post_init__(self) -> None:
        self.items = _check_length(ITEMS.decode_list_field(self.items, "items", required=True))


def _check_length(items: Any) -> Any:
    if items is not None and len(items) > MAX_NEW_ITEMS:
        raise ValueError(f"Expected `array` of length <= {MAX_NEW_ITEMS} - at `$.items`")
    return items
