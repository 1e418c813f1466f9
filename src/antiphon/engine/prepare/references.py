"""References in a request's input: load the stored items they name, and drop items that the history already has."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from antiphon import offload
from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES, PAIRED_TYPES, get_comparable_text
from antiphon.engine.prepare.history_repair import find_unanswered_calls
from antiphon.engine.prepare.repeated_calls import identify_repeated_calls
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.codec import encode
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import Item, ItemReference, Message, Reasoning
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store, parse_response_id
from antiphon.store.history_budget import HistoryShare

# Item types that may be abbreviated references to stored items.
_ABBREVIATED_TYPES = frozenset({ItemReference, Reasoning, ImageGenerationCall})


class ResolvedInput(NamedTuple):
    """The new items of a request, their indexes in the input, and warnings about the items that were dropped."""

    items: list[Item | Unknown]
    indexes: Sequence[int]
    warnings: list[str]


async def resolve_references(
    items: list[Item | Unknown],
    *,
    sent: Sequence[Item | Unknown],
    history: list[Item | Unknown],
    project: str,
    store: Store,
    share: HistoryShare | None = None,
) -> ResolvedInput:
    """Replace references by the stored items, and drop items that the history already has.

    The memory of stored items is reserved in `share`.

    Some clients send the whole history along with the id of the response that ends it. `sent` are the items before
    normalization gave ids to them. Raises InvalidRequest on an item that has the id of another item in the history.
    """
    if not history and _ABBREVIATED_TYPES.isdisjoint(map(type, items)):  # the common case
        return ResolvedInput(items, range(len(items)), [])
    if history:
        items = await offload.run(identify_repeated_calls, items, sent, history)
    detector = await offload.run(_RepeatDetector, history, items)
    bare = [item.id for item in items if item.id is not None and _is_bare_reasoning(item)]
    references = (item.id for item in items if isinstance(item, ItemReference) or _is_bare_image(item))
    names = [name for name in references if name is not None and not detector.has(name)]
    if not history and not bare and not names:
        return ResolvedInput(items, range(len(items)), [])
    if share is not None:
        share.param = "input"
    outputs = await _load_output_items(bare, project, store, share)
    loaded = await store.load_items(project, dict.fromkeys(names), share=share) if names else {}
    return await offload.run(_resolve, items, sent, detector, outputs, loaded)


def _resolve(
    items: Sequence[Item | Unknown],
    sent: Sequence[Item | Unknown],
    detector: "_RepeatDetector",
    outputs: Mapping[str, Item | Unknown],
    loaded: Mapping[str, Item | Unknown],
) -> ResolvedInput:
    """Resolve the items. `outputs` has stored reasoning, and `loaded` images and the items that references name."""
    resolved: dict[int, Item | Unknown] = {}
    warnings: list[str] = []
    start = 0  # the index after the last repeated item
    for index, item in enumerate(items):
        key = _get_item_key(item)
        if key is not None and detector.has(key):
            detector.check_repeat(item, key, index)
            messages = _pick_messages_without_id(resolved, sent, range(start, index))
            for repeated in detector.find_repeated_messages(key, messages):
                del resolved[repeated]
                warnings.append(f"input[{repeated}]: this message is part of the history already")
            warnings.append(f"input[{index}]: {key} is part of the history already")
            start = index + 1
        elif isinstance(item, ItemReference):
            resolved[index] = _require_item(loaded, item.id, param=f"input[{index}]")
        elif _is_bare_reasoning(item):
            found = outputs.get(item.id or "")
            resolved[index] = found if isinstance(found, Reasoning) else item
        elif _is_bare_image(item):
            found = loaded.get(item.id or "")
            resolved[index] = found if isinstance(found, ImageGenerationCall) else item
        else:
            resolved[index] = item
            if isinstance(item, CALL_TYPES) and item.call_id is not None:
                # A new call reuses the id of an answered call, so its output is new, too.
                detector.forget_output(item.call_id)
    return ResolvedInput(list(resolved.values()), list(resolved), warnings)


async def load_referenced_items(
    items: Iterable[Item | Unknown], *, project: str, store: Store, param: str, share: HistoryShare | None = None
) -> dict[int, Item | Unknown]:
    """Return the stored items that references name, by the index of the reference. `param` is the field of the items.

    The items are searched in responses and conversations. Their memory is reserved in `share`.
    """
    names = {index: item.id for index, item in enumerate(items) if isinstance(item, ItemReference)}
    if share is not None:
        share.param = param
    loaded = await store.load_items(project, dict.fromkeys(names.values()), share=share) if names else {}
    return {index: _require_item(loaded, name, param=f"{param}[{index}]") for index, name in names.items()}


def _require_item(loaded: Mapping[str, Item | Unknown], item_id: str, *, param: str) -> Item | Unknown:
    found = loaded.get(item_id)
    if found is None:
        raise NotFound(
            f"Item with id '{item_id}' not found. Items are saved only if their response is stored.", param=param
        )
    return found


def check_unique_ids(items: list[Item | Unknown]) -> None:
    """Raise InvalidRequest if two items have one id: a stored item is referenced by its id.

    Clients recognise this error by its parameter and the start of its text, which are OpenAI's. It has no code there.
    """
    ids = [item.id for item in items]
    if len(set(ids)) == len(ids):  # the common case
        return
    seen: set[str] = set()
    for item_id in ids:
        if item_id in seen:
            raise InvalidRequest(
                f"Duplicate item found with id '{item_id}': send each item once, or without an id.", param="input"
            )
        if item_id is not None:
            seen.add(item_id)


def _pick_messages_without_id(
    resolved: Mapping[int, Item | Unknown], sent: Sequence[Item | Unknown], indexes: Iterable[int]
) -> dict[int, Message]:
    """Return the new messages that the client sent without an id, by index."""
    found = ((index, resolved[index]) for index in indexes if not sent[index].id)
    return {index: item for index, item in found if isinstance(item, Message)}


async def _load_output_items(
    item_ids: Sequence[str], project: str, store: Store, share: HistoryShare | None
) -> dict[str, Item | Unknown]:
    """Load those of the items that are output of stored responses, in one query."""
    owners = dict.fromkeys(owner for item_id in item_ids if (owner := parse_response_id(item_id)) is not None)
    outputs = await store.load_outputs(project, list(owners), share=share) if owners else []
    return {item.id: item for item in outputs if item.id is not None}


def _is_bare_reasoning(item: Item | Unknown) -> bool:
    """Return True for reasoning with neither content nor encrypted content: the client expects us to have stored it."""
    return isinstance(item, Reasoning) and bool(item.id) and not item.content and not item.encrypted_content


def _is_bare_image(item: Item | Unknown) -> bool:
    """Return True for a generated image without its data: the client expects us to have stored it."""
    return isinstance(item, ImageGenerationCall) and item.result is None and item.status in (None, "completed")


class _RepeatDetector:
    """Finds items of an input that the history already has.

    Texts are read only when two items have to be compared.
    """

    def __init__(self, history: Sequence[Item | Unknown], items: Sequence[Item | Unknown]) -> None:
        self._history = history
        # The positions in the history of the keys that the input has.
        self._positions: dict[str, list[int]] = {}
        sent_keys = {_get_item_key(item) for item in items} - {None}
        for position, item in enumerate(history):
            key = _get_item_key(item) if type(item) in PAIRED_TYPES else item.id
            if key in sent_keys and key is not None:
                self._positions.setdefault(key, []).append(position)
        self._texts: dict[str, set[tuple[str, ...]]] = {}
        self._next_position = 0  # after the last item of the history that was repeated in order
        self._unanswered = {history[index].id: call_id for index, call_id in find_unanswered_calls(history).items()}
        # If the input repeats such a call, outputs before it belong to earlier calls with the same call id.
        for item_id in self._unanswered.keys() - {item.id for item in items}:
            self.forget_output(self._unanswered[item_id])

    def has(self, key: str) -> bool:
        return key in self._positions

    def forget_output(self, call_id: str) -> None:
        """Treat outputs of this call as new from now on."""
        self._positions.pop(_make_output_key(call_id), None)

    def check_repeat(self, item: Item | Unknown, key: str, index: int) -> None:
        """Raise InvalidRequest if no item of the history with this key has the same text."""
        if not isinstance(item, ItemReference):
            if key not in self._texts:
                positions = self._positions[key]
                self._texts[key] = {get_comparable_text(self._history[position]) for position in positions}
            # Only the text is compared, because clients omit many other fields.
            if get_comparable_text(item) not in self._texts[key]:
                raise _make_conflict_error(item, index)
        if item.id in self._unanswered:
            self.forget_output(self._unanswered[item.id])

    def find_repeated_messages(self, key: str, messages: Mapping[int, Message]) -> list[int]:
        """Return the indexes of the messages that the history has before the item with this key.

        `messages` were sent just before that item. A message counts as repeated only if it comes in the same order as
        in the history: between two repeated items, or before the first.
        """
        positions = self._positions.get(key, ())
        nearest = bisect_left(positions, self._next_position)
        if nearest == len(positions):  # out of order: it does not show that the messages before it are repeated
            return []
        begin, end = self._next_position, positions[nearest]
        self._next_position = end + 1
        if not messages:
            return []
        known: dict[tuple[object, ...], list[int]] = {}
        for position in range(begin, end):
            item = self._history[position]
            if isinstance(item, Message):
                known.setdefault(_make_content_key(item), []).append(position)
        found: list[int] = []
        for index, message in messages.items():
            equal = known.get(_make_content_key(message), ())
            nearest = bisect_left(equal, begin)
            if nearest < len(equal):
                found.append(index)
                begin = equal[nearest] + 1
        return found


def _make_conflict_error(item: Item | Unknown, index: int) -> InvalidRequest:
    if isinstance(item, OUTPUT_TYPES):
        return InvalidRequest(
            f"The history has another output for call_id {item.call_id}.", param=f"input[{index}]", code="invalid_value"
        )
    return InvalidRequest(
        f"The history has another item with id '{item.id}'. Send this item with a different id, or without one.",
        param=f"input[{index}].id",
        code="invalid_value",
    )


def _make_content_key(message: Message) -> tuple[object, ...]:
    """Return the message's role and content, regardless of the part type its text is in."""
    if isinstance(message.content, str):
        return message.role, message.content
    return message.role, *(getattr(part, "text", None) or encode(part) for part in message.content)


def _get_item_key(item: Item | Unknown) -> str | None:
    """Return the key that identifies an item: its id, or for an output its call, as clients give outputs no ids."""
    if isinstance(item, OUTPUT_TYPES) and item.call_id is not None:
        return _make_output_key(item.call_id)
    return item.id


def _make_output_key(call_id: str) -> str:
    return f"the output of {call_id}"
