"""Answers in one batch that are text and nothing else. Most answers that are not streamed are."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from antiphon.protocol.content import OutputText
from antiphon.protocol.items import Message
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Finish, Served, Text, TokenUsage

# Events of such an answer between the first lifecycle events and the terminal one.
EVENT_COUNT = 6

_TYPES = [Text, TokenUsage, Finish]


class PlainAnswer(NamedTuple):
    """The content of a plain answer. `served` names the model if the upstream has answered with another one."""

    text: str
    usage: Usage
    served: Served | None

    def make_message(self, item_id: str) -> Message:
        """Return the output item of the answer."""
        return Message("assistant", [OutputText(self.text, [], [])], item_id, "completed")


def find_plain_answer(batch: Sequence[Delta]) -> PlainAnswer | None:
    """Return the plain answer that a batch consists of, or None."""
    served: Served | None = None
    if len(batch) == len(_TYPES) + 1 and type(batch[0]) is Served:
        served, batch = batch[0], batch[1:]
    if [*map(type, batch)] != _TYPES:
        return None
    text, usage, finish = cast(tuple[Text, TokenUsage, Finish], batch)
    if not text.text or text.logprobs or finish.reason != "stop":
        return None
    return PlainAnswer(text.text, usage.usage, served)
