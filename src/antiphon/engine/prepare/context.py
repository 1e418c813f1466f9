"""What a request builds on: the chain or the conversation it continues, with its references filled in."""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from antiphon.engine.prepare.history import CALLS, OUTPUTS, find_answered, read_words
from antiphon.engine.prepare.repair import find_lone_calls, repair
from antiphon.engine.respond.session import Session
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.expansion import expand
from antiphon.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from antiphon.protocol.codec import encode
from antiphon.protocol.items import Item, ItemReference, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Link, Store
from antiphon.store.ownership import find_owner


class Repeats:
    """What the history holds, and how far the input has told it again. What it says is read only if need be.

    `again` are the ids in the input.
    """

    def __init__(self, items: Sequence[Item | Unknown], *, again: set[str | None]) -> None:
        self._items = items
        self._places: dict[str | None, list[int]] = {}
        for place, item in enumerate(items):
            self._places.setdefault(identify(item), []).append(place)
        self._words: dict[str, set[tuple[str, ...]]] = {}
        self._told = 0
        self._waiting = {items[index].id: call_id for index, call_id in find_lone_calls(items).items()}
        # If the input has such a call again, outputs before it are those of earlier calls with its id.
        for item_id in self._waiting.keys() - again:
            self.forget_output(self._waiting[item_id])

    def has(self, identity: str) -> bool:
        return identity in self._places

    def forget_output(self, call_id: str) -> None:
        """From now on, an output for this call is a new one."""
        self._places.pop(_name_output(call_id), None)

    def note(self, item: Item | Unknown, identity: str, index: int) -> None:
        """Take note of an item that comes again. Raises if all of them say something else."""
        if not isinstance(item, ItemReference):
            if identity not in self._words:
                self._words[identity] = {read_words(self._items[place]) for place in self._places[identity]}
            # Only words count: clients leave out much of what an item has.
            if read_words(item) not in self._words[identity]:
                raise _differs(item, index)
        if item.id in self._waiting:
            self.forget_output(self._waiting[item.id])

    def find_messages(self, identity: str, messages: Mapping[int, Message]) -> list[int]:
        """Which of these messages, sent just before an item of the history, the history has before that item.

        One that only says the same as an earlier one is not among them, unless it comes in the same order: between
        those that have come again, or before the first of them.
        """
        places = self._places.get(identity, ())
        nearest = bisect_left(places, self._told)
        if nearest == len(places):  # it is out of order, and tells nothing about others
            return []
        begin, end = self._told, places[nearest]
        self._told = end + 1
        if not messages:
            return []
        said: dict[tuple[object, ...], list[int]] = {}
        for place in range(begin, end):
            item = self._items[place]
            if isinstance(item, Message):
                said.setdefault(_read_message(item), []).append(place)
        found: list[int] = []
        for index, message in messages.items():
            alike = said.get(_read_message(message), ())
            nearest = bisect_left(alike, begin)
            if nearest < len(alike):
                found.append(index)
                begin = alike[nearest] + 1
        return found


def _differs(item: Item | Unknown, index: int) -> InvalidRequest:
    if isinstance(item, OUTPUTS):
        return InvalidRequest(
            f"The history has another output for call_id {item.call_id}.", param=f"input[{index}]", code="invalid_value"
        )
    return InvalidRequest(
        f"The history has another item with id '{item.id}'. Send this one with an id of its own, or without one.",
        param=f"input[{index}].id",
        code="invalid_value",
    )


def _read_message(message: Message) -> tuple[object, ...]:
    """All that a message says, in words or otherwise, whatever kind of text the words are in."""
    if isinstance(message.content, str):
        return message.role, message.content
    return message.role, *(getattr(part, "text", None) or encode(part) for part in message.content)


def identify(item: Item | Unknown) -> str | None:
    """What tells an item from all others: for an output the call it answers, since clients give outputs no ids."""
    if isinstance(item, OUTPUTS) and item.call_id is not None:
        return _name_output(item.call_id)
    return item.id


def _name_output(call_id: str) -> str:
    return f"the output of {call_id}"


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The items that come before the request's own, and the tools of the response it continues.

    `left_out` are items of which a compaction has taken the place.
    """

    items: list[Item | Unknown] = []
    left_out: list[Item | Unknown] = []
    tools: list[Tool | Unknown] | None = None
    repairs: list[str] = []


def conversation_of(request: CreateRequest) -> str | None:
    """The id of the conversation a request belongs to."""
    conversation = request.conversation
    return conversation if conversation is None or isinstance(conversation, str) else conversation.id


async def fetch_context(
    request: CreateRequest,
    *,
    project: str,
    store: Store,
    sealer: Sealer,
    inherit_tools: bool,
    session: Session | None = None,
) -> Context:
    """Fetch what the request continues: from its connection's memory or from the store. Raises if it is in neither."""
    conversation = conversation_of(request)
    if conversation is not None:
        items = await store.conversation_items(project, conversation)
        if items is None:
            raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")
        return _read(items, request, sealer, project)
    if request.previous_response_id is None:
        return Context()
    wants_tools = inherit_tools and request.tools is None
    remembered = session.find(request.previous_response_id) if session is not None else None
    if remembered is not None:
        # Whoever deletes a stored response does not want it to be continued.
        if remembered.stored and await store.load(project, remembered.id) is None:
            raise _previous_not_found(remembered.id)
        return _read(remembered.items, request, sealer, project, tools=remembered.tools if wants_tools else None)
    (chain, losses), tools = await asyncio.gather(
        _fetch_chain(store, project, request.previous_response_id),
        _fetch_tools(store, project, request.previous_response_id) if wants_tools else _no_tools(),
    )
    return _read(chain, request, sealer, project, tools=tools, losses=losses)


def _read(
    items: Sequence[Item | Unknown],
    request: CreateRequest,
    sealer: Sealer,
    project: str,
    *,
    tools: list[Tool | Unknown] | None = None,
    losses: Sequence[str] = (),
) -> Context:
    """What was kept, as a model can read it."""
    # Compactions first: the half of a pair that one covers must not be mended.
    answered_next = _find_answers(request, items)
    expanded = expand(items, sealer, project=project, answered_next=answered_next)
    mended = repair(expanded.items, answered_next=answered_next)
    repairs = [*losses, *expanded.warnings, *mended.repairs]
    return Context(items=mended.items, left_out=expanded.left_out, repairs=repairs, tools=tools)


def _find_answers(request: CreateRequest, earlier: Sequence[Item | Unknown]) -> set[str]:
    """The calls of the history that the request's own input answers."""
    if not isinstance(request.input, list):
        return set()
    sent_again = {item.id for item in earlier if isinstance(item, CALLS) and item.id}
    return find_answered([item for item in request.input if item.id not in sent_again])


async def _fetch_chain(store: Store, project: str, response_id: str) -> tuple[list[Item | Unknown], list[str]]:
    """All that a response and those before it have read and said, and what of that is lost."""
    chain = await store.chain(project, response_id)
    missing = response_id if not chain else chain[0].previous_response_id
    if missing is not None:
        raise _previous_not_found(missing)
    if not chain[-1].final:  # its output is still to come, and a continuation would silently lack it
        raise InvalidRequest(
            f"Previous response with id '{response_id}' has not ended yet.",
            param="previous_response_id",
            code="previous_response_not_ended",
        )
    oldest, *later = chain
    earlier, losses = await _fetch_beginning(store, project, oldest)
    # What it had brought may have been there by then, from another that ran at the same time.
    known = {item.id: item for item in earlier}
    own = [item for item in oldest.items if item.id is None or known.get(item.id) != item]
    return [*earlier, *own, *(item for link in later for item in link.items)], losses


async def _fetch_beginning(store: Store, project: str, oldest: Link) -> tuple[list[Item | Unknown], list[str]]:
    """What the conversation of a chain's oldest response held before it, and a note if that is lost."""
    if oldest.conversation is None:
        return [], []
    # A response that failed or was cancelled is no part of its conversation: all of that comes before it.
    items = await store.conversation_items(project, oldest.conversation, before=oldest.id)
    if items is None:
        return [], [f"the conversation {oldest.conversation} is gone, and what it held before {oldest.id} with it"]
    return items, []


def _previous_not_found(response_id: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{response_id}' not found.", param="previous_response_id"
    )


async def _fetch_tools(store: Store, project: str, response_id: str) -> list[Tool | Unknown] | None:
    stored = await store.load(project, response_id)
    return stored.response.tools if stored is not None else None


async def _no_tools() -> None:
    return None


# What may stand for more than is in it.
_SHORT = frozenset({ItemReference, Reasoning})


class Filled(NamedTuple):
    """A request's own items, and for each its place in the input. `repeated` tells what was left out."""

    items: list[Item | Unknown]
    places: Sequence[int]
    repeated: list[str]


async def fill_references(
    items: list[Item | Unknown],
    *,
    sent: Sequence[Item | Unknown],
    earlier: list[Item | Unknown],
    project: str,
    store: Store,
) -> Filled:
    """Put the stored items in the place of references to them, and leave out what the history already holds.

    Some clients send the whole history along with the id of the response that ends it. `sent` are the items as they
    came: to messages without ids, ids have been given. Raises on an item that only has the id of one in the history.
    """
    short = [item for item in items if type(item) in _SHORT]
    wanted = [item.id for item in short if item.id is not None and (isinstance(item, ItemReference) or _is_bare(item))]
    if not earlier and not wanted:
        return Filled(items, range(len(items)), [])
    made = await _load_made(wanted, project, store)
    repeats = Repeats(earlier, again={item.id for item in items})
    filled: dict[int, Item | Unknown] = {}
    repeated: list[str] = []
    begin = 0  # of what has come since the last item that the history has
    for index, item in enumerate(items):
        identity = identify(item)
        if identity is not None and repeats.has(identity):
            repeats.note(item, identity, index)
            spoken = _pick_nameless(filled, sent, range(begin, index))
            for place in repeats.find_messages(identity, spoken):
                del filled[place]
                repeated.append(f"input[{place}]: this message is part of the history already")
            repeated.append(f"input[{index}]: {identity} is part of the history already")
            begin = index + 1
        elif isinstance(item, ItemReference):
            found = made.get(item.id)
            filled[index] = found or await find_item(item.id, project=project, store=store, param=f"input[{index}]")
        elif _is_bare(item):
            found = made.get(item.id or "")
            filled[index] = found if isinstance(found, Reasoning) else item
        else:
            filled[index] = item
            if isinstance(item, CALLS) and item.call_id is not None:
                # A new call under the id of an answered one: its output is new, too.
                repeats.forget_output(item.call_id)
    return Filled(list(filled.values()), list(filled), repeated)


def _pick_nameless(
    filled: Mapping[int, Item | Unknown], sent: Sequence[Item | Unknown], indexes: Iterable[int]
) -> dict[int, Message]:
    """Those of the new items that are messages and came without an id, by their indexes."""
    found = ((index, filled[index]) for index in indexes if not sent[index].id)
    return {index: item for index, item in found if isinstance(item, Message)}


async def _load_made(item_ids: Sequence[str], project: str, store: Store) -> dict[str, Item | Unknown]:
    """Those of these items that were made in stored responses, in one go: a client may refer to all that was said."""
    owners = dict.fromkeys(owner for item_id in item_ids if (owner := find_owner(item_id)) is not None)
    outputs = await store.load_outputs(project, list(owners)) if owners else []
    return {item.id: item for item in outputs if item.id is not None}


def _is_bare(item: Item | Unknown) -> bool:
    """Whether nothing is left of a model's reasoning but its summary: clients that do not keep the rest count on us."""
    return isinstance(item, Reasoning) and bool(item.id) and not item.content and not item.encrypted_content


def check_ids(items: list[Item | Unknown]) -> None:
    """Raise on an id that stands for two items: kept, nobody could refer to either, and no conversation takes both."""
    seen: set[str] = set()
    for index, item in enumerate(items):
        if item.id is not None and item.id in seen:
            raise InvalidRequest(
                f"There is more than one item with id '{item.id}'.", param=f"input[{index}].id", code="invalid_value"
            )
        if item.id is not None:
            seen.add(item.id)


async def find_item(item_id: str, *, project: str, store: Store, param: str) -> Item | Unknown:
    """The stored item that a reference names: of a response, or of a conversation. `param` is the reference's place."""
    owner = find_owner(item_id)
    stored = await store.load(project, owner) if owner is not None else None
    if stored is not None:
        for item in (*stored.input, *stored.response.output):
            if item.id == item_id:
                return item
    found = await store.find_item(project, item_id)
    if found is None:
        raise NotFound(
            f"Item with id '{item_id}' not found. Items are kept only if their response was stored.",
            param=param,
        )
    return found
