"""Selection of the items that a compaction retains: the task, the latest question and the last steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import msgspec

from antiphon.engine.prepare.history_repair import drop_unfinished_items
from antiphon.engine.serve.compaction.clipping import clip_item, clip_text, measure_item, measure_smallest
from antiphon.protocol.content import InputText, extract_text
from antiphon.protocol.hosted import McpApprovalRequest, McpApprovalResponse
from antiphon.protocol.items import Item, Message, Reasoning
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown

Step = list[Item | Unknown]

_SHORT_OUTPUT = 300
# Stored in retained messages: do not change the text.
_GAP = "[there was no room for what stood here, and it was left out: "


class _CallId(msgspec.Struct):
    call_id: str | None = None


def split_steps(items: Sequence[Item | Unknown]) -> list[Step]:
    """Split the items into steps: a call and its output are in one step, and reasoning is with the item after it."""
    outputs_left = Counter(answered for item in items if (answered := _find_answered(item)) is not None)
    steps: list[Step] = []
    waiting: set[str] = set()
    follows_reasoning = False
    for item in items:
        if not steps or not (waiting or follows_reasoning):
            steps.append([])
        steps[-1].append(item)
        follows_reasoning = isinstance(item, Reasoning)
        answered = _find_answered(item)
        if answered is not None:
            outputs_left[answered] -= 1
            waiting.discard(answered)
        elif (called := _find_own_call(item)) is not None and outputs_left[called]:
            waiting.add(called)
    return steps


def join_unread_steps(steps: Sequence[Step]) -> list[Step]:
    """Join the steps after the model's last output into one: tool outputs, and messages after them."""
    start = len(steps)
    while start > 0 and _is_input_message(steps[start - 1]):
        start -= 1
    if 0 < start < len(steps) and _find_answered(steps[start - 1][-1]) is not None:
        start -= 1
    unread = [item for step in steps[start:] for item in step]
    return [*steps[:start], unread] if unread else list(steps)


def _is_input_message(step: Step) -> bool:
    """Return True if the step is a message that the model did not write."""
    return len(step) == 1 and isinstance(step[0], Message) and step[0].role != "assistant"


def pair_calls(step: Step) -> list[Step]:
    """Return the items of a step, each call together with its output."""
    pairs: list[Step] = []
    waiting: dict[str, Step] = {}
    for item in step:
        answered = _find_answered(item)
        if answered is not None and answered in waiting:
            waiting.pop(answered).append(item)
            continue
        pairs.append([item])
        if answered is None and (called := _find_own_call(item)) is not None:
            waiting[called] = pairs[-1]
    return pairs


def find_end_of_outputs(step: Step) -> int:
    """Return the index after the last output. An item inserted there does not separate a call from its output."""
    return max((index + 1 for index, item in enumerate(step) if _find_answered(item) is not None), default=0)


def _find_answered(item: Item | Unknown) -> str | None:
    """Return the id of the call that an item answers."""
    if isinstance(item, McpApprovalResponse):
        return item.approval_request_id
    return _find_call_id(item) if item.type.endswith("_output") else None


def _find_own_call(item: Item | Unknown) -> str | None:
    """Return the id by which an output answers this item."""
    return item.id if isinstance(item, McpApprovalRequest) else _find_call_id(item)


def _find_call_id(item: Item | Unknown) -> str | None:
    if not isinstance(item, Unknown):
        return getattr(item, "call_id", None)
    try:
        parsed: _CallId = read_json(item.raw, _CallId)
    except msgspec.DecodeError:
        return None
    return parsed.call_id


class SizeLimits(msgspec.Struct, frozen=True):
    """Limits in characters: `hard` is the space there is, `soft` the space to use if possible."""

    hard: int
    soft: int


class SelectedItems(msgspec.Struct, frozen=True):
    """`first` are retained before the summary and `last` after it. `rest` are the items to summarise."""

    first: list[Item | Unknown]
    last: list[Item | Unknown]
    rest: list[Item | Unknown]


def select_items(items: Sequence[Item | Unknown], limits: SizeLimits) -> SelectedItems:
    """Select the items to retain."""
    last, taken, removed = _take_last_steps(join_unread_steps(split_steps(items)), limits)
    older = [*items[: len(items) - taken], *removed]
    questions = [item for item in items if is_question(item)]
    first = _take_questions(questions, older, limits)
    retained = {id(item) for item in first}
    return SelectedItems(first, last, [] if all(id(item) in retained for item in older) else older)


def _take_last_steps(steps: Sequence[Step], limits: SizeLimits) -> tuple[Step, int, Step]:
    """Return the last steps that fit, their number of items, and the items removed from the very last step."""
    if not steps:
        return [], 0, []
    text_size = sum(measure_item(item) for item in steps[-1] if isinstance(item, Message))
    retained, removed = _shrink(steps[-1], limits.hard // 4 + min(text_size, limits.hard // 4))
    taken, size = len(steps[-1]), sum(map(measure_item, retained))
    for step in reversed(steps[:-1]):
        smaller = _shrink_outputs(step, limits.soft // 4 - size, max_output=max(_SHORT_OUTPUT, limits.soft // 16))
        if smaller is None:
            break
        retained[:0] = smaller
        taken += len(step)
        size += sum(map(measure_item, smaller))
    return retained, taken, removed


def _shrink(step: Step, size: int) -> tuple[Step, Step]:
    """Return the step clipped to about `size` characters, and the items removed from it. Short items stay whole."""
    sizes = {id(item): measure_item(item) for item in step}
    if sum(sizes.values()) <= size:
        return list(step), []
    floor = min(_SHORT_OUTPUT, size // 4)
    needs = {id(item): min(sizes[id(item)], max(measure_smallest(item), floor)) for item in step}
    admitted = _admit(step, needs, size)
    spare = size - sum(needs[each] for each in admitted)
    smaller: dict[int, Item | Unknown | None] = {}
    by_missing = sorted(
        (item for item in step if id(item) in admitted), key=lambda item: sizes[id(item)] - needs[id(item)]
    )
    for number, item in enumerate(by_missing):
        given = max(0, min(sizes[id(item)] - needs[id(item)], spare // (len(by_missing) - number)))
        spare -= given
        smaller[id(item)] = clip_item(item, needs[id(item)] + given)
    retained = [clipped for item in step if (clipped := smaller.get(id(item))) is not None]
    # Reasoning is not reported: the call after it is complete without it.
    removed: Step = [item for item in step if id(item) not in smaller and not isinstance(item, Reasoning)]
    end = find_end_of_outputs(retained)
    return drop_unfinished_items([*retained[:end], *_make_gap_note(removed), *retained[end:]])[0], removed


def _admit(step: Step, needs: Mapping[int, int], size: int) -> set[int]:
    """Return the ids of the items that fit: the last message in any case, and each call only with its output."""
    admitted = {id(item) for item in [item for item in step if isinstance(item, Message)][-1:]}
    left = size - sum(needs[each] for each in admitted)
    pairs = [(sum(needs[id(item)] for item in each), each) for each in pair_calls(step) if id(each[0]) not in admitted]
    pairs.reverse()  # of those of one size, prefer the latest
    for need, each in sorted(pairs, key=lambda known: (isinstance(known[1][0], Reasoning), known[0])):
        if need <= left:
            admitted.update(map(id, each))
            left -= need
    return admitted


def _make_gap_note(removed: Step) -> Step:
    """Return a message that lists the removed items: every model and every upstream accepts a message."""
    if not removed:
        return []
    kinds = Counter(item.type for item in removed)
    text = ", ".join(f"{kind} ({number})" if number > 1 else kind for kind, number in kinds.items())
    return [Message("user", [InputText(f"{_GAP}{clip_text(text, _SHORT_OUTPUT)}]")])]


def is_question(item: Item | Unknown) -> TypeGuard[Message]:
    """Return True if the item is a message of the user, not a note of an earlier compaction."""
    return isinstance(item, Message) and item.role == "user" and not extract_text(item.content).startswith(_GAP)


def _shrink_outputs(step: Step, size: int, *, max_output: int) -> Step | None:
    """Return the step with each output clipped to `max_output`, or None if it is longer than `size`."""
    smaller = [clip_item(item, max_output) if item.type.endswith("_output") else item for item in step]
    clipped = [item for item in smaller if item is not None]
    return clipped if len(clipped) == len(step) and sum(map(measure_item, clipped)) <= size else None


def _take_questions(
    questions: Sequence[Message], older: Sequence[Item | Unknown], limits: SizeLimits
) -> list[Item | Unknown]:
    """Return the first and the last question, clipped, unless they are in the last steps."""
    older_ids = {id(item) for item in older}
    sizes = {0: limits.soft // 8, len(questions) - 1: limits.hard // 4} if questions else {}
    clipped = [clip_item(questions[index], size) for index, size in sizes.items() if id(questions[index]) in older_ids]
    return [question for question in clipped if question is not None]
