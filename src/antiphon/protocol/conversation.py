"""Conversations and prompts: state that outlives a response."""

from typing import Literal

from antiphon.protocol.open import Wire, always
from antiphon.protocol.request import Metadata


class Conversation(Wire):
    """A list of items that responses read and add to."""

    id: str
    created_at: int
    metadata: Metadata | None = always(None)
    object: Literal["conversation"] = always("conversation")
