"""A conversation in steps: the smallest pieces that can be kept or left out, each with all that belongs together."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from antiphon.protocol.hosted import McpApprovalRequest, McpApprovalResponse
from antiphon.protocol.items import Item, Message, Reasoning
from antiphon.protocol.json_text import read_json
from antiphon.protocol.open import Unknown

Step = list[Item | Unknown]


class _Link(msgspec.Struct):
    call_id: str | None = None


def split_steps(items: Sequence[Item | Unknown]) -> list[Step]:
    """A call and its output are in one step, with all between them, and reasoning is with what it led to."""
    owed = Counter(answered for item in items if (answered := _find_answered(item)) is not None)
    steps: list[Step] = []
    waiting: set[str] = set()
    leads_on = False
    for item in items:
        if not steps or not (waiting or leads_on):
            steps.append([])
        steps[-1].append(item)
        leads_on = isinstance(item, Reasoning)
        answered = _find_answered(item)
        if answered is not None:
            owed[answered] -= 1
            waiting.discard(answered)
        elif (asked := _find_asked(item)) is not None and owed[asked]:
            waiting.add(asked)
    return steps


def join_unread(steps: Sequence[Step]) -> list[Step]:
    """With all that has come since the model last spoke as one step: outputs, and messages after them."""
    start = len(steps)
    while start > 0 and _is_said(steps[start - 1]):
        start -= 1
    if 0 < start < len(steps) and _find_answered(steps[start - 1][-1]) is not None:
        start -= 1
    unread = [item for step in steps[start:] for item in step]
    return [*steps[:start], unread] if unread else list(steps)


def _is_said(step: Step) -> bool:
    """Whether it is a message that the model did not write."""
    return len(step) == 1 and isinstance(step[0], Message) and step[0].role != "assistant"


def pair(step: Step) -> list[Step]:
    """The items of a step, each call with its output."""
    pairs: list[Step] = []
    waiting: dict[str, Step] = {}
    for item in step:
        answered = _find_answered(item)
        if answered is not None and answered in waiting:
            waiting.pop(answered).append(item)
            continue
        pairs.append([item])
        if answered is None and (asked := _find_asked(item)) is not None:
            waiting[asked] = pairs[-1]
    return pairs


def find_end_of_outputs(step: Step) -> int:
    """The place after the last item that answers a call: what is put there comes between no call and its output."""
    return max((place + 1 for place, item in enumerate(step) if _find_answered(item) is not None), default=0)


def _find_answered(item: Item | Unknown) -> str | None:
    """The call that an item answers."""
    if isinstance(item, McpApprovalResponse):
        return item.approval_request_id
    return _find_call_id(item) if item.type.endswith("_output") else None


def _find_asked(item: Item | Unknown) -> str | None:
    """What an item may be answered by."""
    return item.id if isinstance(item, McpApprovalRequest) else _find_call_id(item)


def _find_call_id(item: Item | Unknown) -> str | None:
    if not isinstance(item, Unknown):
        return getattr(item, "call_id", None)
    try:
        link: _Link = read_json(item.raw, _Link)
    except msgspec.DecodeError:
        return None
    return link.call_id
