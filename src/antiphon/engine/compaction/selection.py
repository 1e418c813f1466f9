"""What stays of a conversation word for word: the task, the question at hand and the last steps, as room allows."""

from collections.abc import Sequence

import msgspec

from antiphon.engine.compaction.clipping import clip_item, measure
from antiphon.engine.compaction.steps import Step, split_steps
from antiphon.protocol.items import Item, Message
from antiphon.protocol.open import Unknown

_SHORT_OUTPUT = 300


class Room(msgspec.Struct, frozen=True):
    """In characters: `hard` is what there is, `soft` what there should be."""

    hard: int
    soft: int


class Selection(msgspec.Struct, frozen=True):
    """`first` comes before the summary and `last` after it. `rest` is what it has to tell: nothing, if all was kept."""

    first: list[Item | Unknown]
    last: list[Item | Unknown]
    rest: list[Item | Unknown]


def select(items: Sequence[Item | Unknown], room: Room) -> Selection:
    """Choose what stays of these."""
    last, taken = _take_last_steps(split_steps(items), room)
    older = items[: len(items) - taken]
    asked = [item for item in items if isinstance(item, Message) and item.role == "user"]
    first = _take_questions(asked, older, room)
    whole = {id(item) for item in first}
    return Selection(first, last, [] if all(id(item) in whole for item in older) else list(older))


def _take_last_steps(steps: Sequence[Step], room: Room) -> tuple[list[Item | Unknown], int]:
    """The last steps, whole as long as there is room, and how many items they were."""
    kept: list[Item | Unknown] = []
    taken = size = 0
    for step in reversed(steps):
        if not taken:
            question = len(step) == 1 and isinstance(step[0], Message)
            smaller = _shrink(step, room.hard // (2 if question else 4))
        else:
            smaller = _shrink_outputs(step, room.soft // 4 - size, most=max(_SHORT_OUTPUT, room.soft // 16))
        if smaller is None:
            break
        kept[:0] = smaller
        taken += len(step)
        size += sum(map(measure, smaller))
    return kept, taken


def _shrink(step: Step, size: int) -> Step | None:
    """The step with about so many characters, if it can be made so: what is short in it stays as it is."""
    if sum(map(measure, step)) <= size:
        return step
    left, smaller = size, dict[int, Item | Unknown]()
    for number, index in enumerate(sorted(range(len(step)), key=lambda index: measure(step[index]))):
        clipped = clip_item(step[index], left // (len(step) - number))
        if clipped is None and step[index].type == "reasoning":
            continue  # a call makes sense without the thought that led to it
        if clipped is None:
            return None
        smaller[index] = clipped
        left -= measure(clipped)
    return [smaller[index] for index in sorted(smaller)]


def _shrink_outputs(step: Step, size: int, *, most: int) -> Step | None:
    """The step, if it is within this size: whole, but no output takes more than `most`, and room of others with it."""
    smaller = [clip_item(item, most) if item.type.endswith("_output") else item for item in step]
    kept = [item for item in smaller if item is not None]
    return kept if len(kept) == len(step) and sum(map(measure, kept)) <= size else None


def _take_questions(asked: Sequence[Message], older: Sequence[Item | Unknown], room: Room) -> list[Item | Unknown]:
    """The task, and what was asked last, of those that are not in the last steps."""
    gone = {id(item) for item in older}
    wanted = {0: room.soft // 8, len(asked) - 1: room.hard // 4} if asked else {}
    questions = [clip_item(asked[place], size) for place, size in wanted.items() if id(asked[place]) in gone]
    return [question for question in questions if question is not None]
