"""What stays of a conversation word for word: the task, the question at hand and the last steps, as room allows."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from antiphon.engine.prepare.history_repair import drop_unfinished_items
from antiphon.engine.serve.compaction.clipping import clip_item, clip_text, measure_item, measure_smallest
from antiphon.protocol.content import InputText, extract_text
from antiphon.protocol.hosted import McpApprovalRequest, McpApprovalResponse
from antiphon.protocol.items import Item, Message, Reasoning
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown

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


def join_unread_steps(steps: Sequence[Step]) -> list[Step]:
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


def pair_calls(step: Step) -> list[Step]:
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


_SHORT_OUTPUT = 300
_GAP = "[there was no room for what stood here, and it was left out: "


class SizeLimits(msgspec.Struct, frozen=True):
    """In characters: `hard` is what there is, `soft` what there should be."""

    hard: int
    soft: int


class SelectedItems(msgspec.Struct, frozen=True):
    """`first` comes before the summary and `last` after it. `rest` is what it has to tell: nothing, if all was kept."""

    first: list[Item | Unknown]
    last: list[Item | Unknown]
    rest: list[Item | Unknown]


def select_items(items: Sequence[Item | Unknown], room: SizeLimits) -> SelectedItems:
    """Choose what stays of these."""
    last, taken, gone = _take_last_steps(join_unread_steps(split_steps(items)), room)
    older = [*items[: len(items) - taken], *gone]
    asked = [item for item in items if isinstance(item, Message) and item.role == "user" and not _tells_gap(item)]
    first = _take_questions(asked, older, room)
    whole = {id(item) for item in first}
    return SelectedItems(first, last, [] if all(id(item) in whole for item in older) else older)


def _take_last_steps(steps: Sequence[Step], room: SizeLimits) -> tuple[Step, int, Step]:
    """The last steps, whole as long as there is room, how many items they were, and what the very last is without."""
    if not steps:
        return [], 0, []
    said = sum(measure_item(item) for item in steps[-1] if isinstance(item, Message))
    kept, gone = _shrink(steps[-1], room.hard // 4 + min(said, room.hard // 4))
    taken, size = len(steps[-1]), sum(map(measure_item, kept))
    for step in reversed(steps[:-1]):
        smaller = _shrink_outputs(step, room.soft // 4 - size, most=max(_SHORT_OUTPUT, room.soft // 16))
        if smaller is None:
            break
        kept[:0] = smaller
        taken += len(step)
        size += sum(map(measure_item, smaller))
    return kept, taken, gone


def _shrink(step: Step, size: int) -> tuple[Step, Step]:
    """The step with about so many characters, and what had to go for it: what is short in it stays as it is."""
    sizes = {id(item): measure_item(item) for item in step}
    if sum(sizes.values()) <= size:
        return list(step), []
    floor = min(_SHORT_OUTPUT, size // 4)
    needs = {id(item): min(sizes[id(item)], max(measure_smallest(item), floor)) for item in step}
    admitted = _admit(step, needs, size)
    spare = size - sum(needs[each] for each in admitted)
    smaller: dict[int, Item | Unknown | None] = {}
    wishing = sorted(
        (item for item in step if id(item) in admitted), key=lambda item: sizes[id(item)] - needs[id(item)]
    )
    for number, item in enumerate(wishing):
        given = max(0, min(sizes[id(item)] - needs[id(item)], spare // (len(wishing) - number)))
        spare -= given
        smaller[id(item)] = clip_item(item, needs[id(item)] + given)
    kept = [clipped for item in step if (clipped := smaller.get(id(item))) is not None]
    # A call makes sense without the thought that led to it.
    gone: Step = [item for item in step if id(item) not in smaller and not isinstance(item, Reasoning)]
    end = find_end_of_outputs(kept)
    return drop_unfinished_items([*kept[:end], *_tell_gap(gone), *kept[end:]])[0], gone


def _admit(step: Step, needs: Mapping[int, int], size: int) -> set[int]:
    """What has room with at least what it needs: the last message in any case, and each call with its output."""
    admitted = {id(item) for item in [item for item in step if isinstance(item, Message)][-1:]}
    left = size - sum(needs[each] for each in admitted)
    pairs = [(sum(needs[id(item)] for item in each), each) for each in pair_calls(step) if id(each[0]) not in admitted]
    pairs.reverse()  # of those that need the same, the last ones are worth more
    for need, each in sorted(pairs, key=lambda known: (isinstance(known[1][0], Reasoning), known[0])):
        if need <= left:
            admitted.update(map(id, each))
            left -= need
    return admitted


def _tell_gap(gone: Step) -> Step:
    """A note in the place of what has no text that could be cut. Every model and every upstream reads a message."""
    if not gone:
        return []
    kinds = Counter(item.type for item in gone)
    told = ", ".join(f"{kind} ({number})" if number > 1 else kind for kind, number in kinds.items())
    return [Message("user", [InputText(f"{_GAP}{clip_text(told, _SHORT_OUTPUT)}]")])]


def _tells_gap(message: Message) -> bool:
    """Nobody asked that."""
    return extract_text(message.content).startswith(_GAP)


def _shrink_outputs(step: Step, size: int, *, most: int) -> Step | None:
    """The step, if it is within this size: whole, but no output takes more than `most`, and room of others with it."""
    smaller = [clip_item(item, most) if item.type.endswith("_output") else item for item in step]
    kept = [item for item in smaller if item is not None]
    return kept if len(kept) == len(step) and sum(map(measure_item, kept)) <= size else None


def _take_questions(
    asked: Sequence[Message], older: Sequence[Item | Unknown], room: SizeLimits
) -> list[Item | Unknown]:
    """The task, and what was asked last, of those that are not in the last steps."""
    gone = {id(item) for item in older}
    wanted = {0: room.soft // 8, len(asked) - 1: room.hard // 4} if asked else {}
    questions = [clip_item(asked[place], size) for place, size in wanted.items() if id(asked[place]) in gone]
    return [question for question in questions if question is not None]
