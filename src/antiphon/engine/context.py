"""What a request builds on: the chain or the conversation it continues, with its references filled in."""

import asyncio
import functools
import itertools
from collections.abc import Sequence

import msgspec

from antiphon.engine.compaction.expansion import expand
from antiphon.engine.history import CALLS, OUTPUTS, find_answered, read_words
from antiphon.engine.repair import find_lone_calls, repair
from antiphon.engine.sealing import Sealer
from antiphon.engine.session import Session
from antiphon.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from antiphon.protocol.items import Item, ItemReference, Reasoning
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import Tool
from antiphon.store.base import Link, Store
from antiphon.store.ownership import find_owner


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
    earlier, losses = await _fetch_beginning(store, project, chain[0])
    return [*earlier, *(item for link in chain for item in link.items)], losses


async def _fetch_beginning(store: Store, project: str, oldest: Link) -> tuple[list[Item | Unknown], list[str]]:
    """What the conversation of a chain's oldest response held before it, and a note if that is lost."""
    if oldest.conversation is None:
        return [], []
    items = await store.conversation_items(project, oldest.conversation)
    if items is None:
        return [], [f"the conversation {oldest.conversation} is gone, and what it held before {oldest.id} with it"]
    # A response that failed or was cancelled is no part of its conversation: all of that comes before it.
    own = {item.id for item in oldest.items}
    return list(itertools.takewhile(lambda item: item.id is None or item.id not in own, items)), []


def _previous_not_found(response_id: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{response_id}' not found.", param="previous_response_id"
    )


async def _fetch_tools(store: Store, project: str, response_id: str) -> list[Tool | Unknown] | None:
    stored = await store.load(project, response_id)
    return stored.response.tools if stored is not None else None


async def _no_tools() -> None:
    return None


async def fill_references(
    items: list[Item | Unknown], *, earlier: list[Item | Unknown], project: str, store: Store
) -> tuple[list[Item | Unknown], list[str]]:
    """Put the stored items in the place of references to them, and leave out what the history already holds.

    Some clients send the whole history along with the id of the response that ends it. Raises on an item that only has
    the id of one in the history.
    """
    wanted = [item.id for item in items if item.id is not None and (isinstance(item, ItemReference) or _is_bare(item))]
    if not earlier and not wanted:
        return items, []
    made = await _load_made(wanted, project, store)
    known: dict[str | None, _Alike] = {}
    for item in earlier:
        known.setdefault(_identify(item), _Alike()).items.append(item)
    waiting = {earlier[index].id: call_id for index, call_id in find_lone_calls(earlier).items()}
    # If the input has such a call again, outputs before it are those of earlier calls with its id.
    for item_id in waiting.keys() - {item.id for item in items}:
        known.pop(_name_output(waiting[item_id]), None)
    filled: list[Item | Unknown] = []
    repeated: list[str] = []
    for index, item in enumerate(items):
        identity = _identify(item)
        if identity is not None and identity in known:
            _require_same(item, known[identity], index)
            repeated.append(f"input[{index}]: {identity} is part of the history already")
            if item.id in waiting:
                known.pop(_name_output(waiting[item.id]), None)
        elif isinstance(item, ItemReference):
            found = made.get(item.id)
            filled.append(found or await find_item(item.id, project=project, store=store, param=f"input[{index}]"))
        elif _is_bare(item):
            found = made.get(item.id or "")
            filled.append(found if isinstance(found, Reasoning) else item)
        else:
            filled.append(item)
            if isinstance(item, CALLS) and item.call_id is not None:
                # A new call under the id of an answered one: its output is new, too.
                known.pop(_name_output(item.call_id), None)
    return filled, repeated


async def _load_made(item_ids: Sequence[str], project: str, store: Store) -> dict[str, Item | Unknown]:
    """Those of these items that were made in stored responses, in one go: a client may refer to all that was said."""
    owners = dict.fromkeys(owner for item_id in item_ids if (owner := find_owner(item_id)) is not None)
    outputs = await store.load_outputs(project, list(owners)) if owners else []
    return {item.id: item for item in outputs if item.id is not None}


def _is_bare(item: Item | Unknown) -> bool:
    """Whether nothing is left of a model's reasoning but its summary: clients that do not keep the rest count on us."""
    return isinstance(item, Reasoning) and bool(item.id) and not item.content and not item.encrypted_content


class _Alike:
    """Items of the history with one identity, mostly just one. What they say is read once, and only if need be."""

    def __init__(self) -> None:
        self.items: list[Item | Unknown] = []

    @functools.cached_property
    def words(self) -> set[tuple[str, ...]]:
        return set(map(read_words, self.items))


def _require_same(item: Item | Unknown, known: _Alike, index: int) -> None:
    """Raise if all of them say something else. Only words count: clients leave out much of what an item has."""
    if isinstance(item, ItemReference) or read_words(item) in known.words:
        return
    if isinstance(item, OUTPUTS):
        raise InvalidRequest(
            f"The history has another output for call_id {item.call_id}.", param=f"input[{index}]", code="invalid_value"
        )
    raise InvalidRequest(
        f"The history has another item with id '{item.id}'. Send this one with an id of its own, or without one.",
        param=f"input[{index}].id",
        code="invalid_value",
    )


def _identify(item: Item | Unknown) -> str | None:
    """What tells an item from all others: for an output the call it answers, since clients give outputs no ids."""
    if isinstance(item, OUTPUTS) and item.call_id is not None:
        return _name_output(item.call_id)
    return item.id


def _name_output(call_id: str) -> str:
    return f"the output of {call_id}"


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
