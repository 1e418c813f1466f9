"""The history of a request: resolve `previous_response_id` or `conversation` into earlier items."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from antiphon import offload
from antiphon.engine.items import CALL_TYPES, PAIRED_TYPES
from antiphon.engine.prepare.call_pairs import find_answered_calls
from antiphon.engine.prepare.history_repair import repair_history
from antiphon.engine.prepare.repeated_calls import identify_repeated_calls
from antiphon.engine.respond.connection_memory import ConnectionMemory
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.expansion import expand_compactions
from antiphon.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest, get_conversation_id
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Link, Store
from antiphon.store.history_budget import HistoryShare

# Longer than the ids of other servers, some of which contain routing data.
_MAX_ID_LENGTH = 512
_ID = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The items before the request's own, and the tools of the previous response.

    `compacted` are the items that a compaction replaces. `repairs` describe changes to damaged stored items.
    """

    items: list[Item | Unknown] = []
    compacted: list[Item | Unknown] = []
    tools: list[Tool | Unknown] | None = None
    repairs: list[str] = []


def may_load_items(request: CreateRequest) -> bool:
    """Return True if the request may load stored items: a history, or items that its input or its prompt refers to."""
    return (
        type(request.input) is list
        or request.previous_response_id is not None
        or request.conversation is not None
        or request.prompt is not None
    )


async def load_history(
    request: CreateRequest,
    *,
    project: str,
    store: Store,
    sealer: Sealer,
    inherit_tools: bool,
    memory: ConnectionMemory | None = None,
    share: HistoryShare | None = None,
) -> History:
    """Load the history from the memory of the connection, else from the store. Reserve room for it in `share`.

    Raises NotFound if the conversation is missing, PreviousResponseNotFound if the previous response is.
    """
    conversation = get_conversation_id(request)
    if share is not None:
        share.param = "previous_response_id" if conversation is None else "conversation"
    if conversation is not None:
        _check_id(conversation, "conv", param="conversation")
        items = await store.load_conversation_items(project, conversation, share=share)
        if items is None:
            raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")
        return await _make_history_off_loop(items, request, sealer, project)
    if request.previous_response_id is None:
        return History()
    _check_id(request.previous_response_id, "resp", param="previous_response_id")
    wants_tools = inherit_tools and request.tools is None
    remembered = memory.find(request.previous_response_id) if memory is not None else None
    if remembered is not None:
        # A stored response that was deleted meanwhile must not be continued.
        if remembered.stored and await store.load_bare_response(project, remembered.id) is None:
            raise _previous_not_found(remembered.id)
        if share is not None:  # the connection counts the items, but not the copies of them
            await share.reserve(0, decoded=remembered.size)
        tools = remembered.tools if wants_tools else None
        return await _make_history_off_loop(remembered.items, request, sealer, project, tools)
    chain = await _load_chain(store, project, request.previous_response_id, with_tools=wants_tools, share=share)
    return await _make_history_off_loop(chain.items, request, sealer, project, chain.tools, chain.losses)


async def _make_history_off_loop(items: Sequence[Item | Unknown], *arguments: Any) -> History:
    """Make the history, in a thread if there are many items. Then the request is large."""
    if len(items) > offload.LARGE_COUNT:
        offload.mark_large()
    return await offload.run(_make_history, items, *arguments)


def _check_id(value: str, prefix: str, *, param: str) -> None:
    """Raise InvalidRequest if no server of this API could have created the id, or it is the id of another object."""
    if len(value) > _MAX_ID_LENGTH:
        raise InvalidRequest(
            f"Invalid '{param}': the id has {len(value)} characters; at most {_MAX_ID_LENGTH} are allowed.",
            param=param,
            code="string_above_max_length",
        )
    if not value.startswith(prefix) or _ID.fullmatch(value) is None:
        raise InvalidRequest(
            f"Invalid '{param}': '{value}'. Expected an id that begins with '{prefix}' and has only letters, digits, "
            "underscores and dashes.",
            param=param,
            code="invalid_value",
        )


def _make_history(
    items: Sequence[Item | Unknown],
    request: CreateRequest,
    sealer: Sealer,
    project: str,
    tools: list[Tool | Unknown] | None = None,
    losses: Sequence[str] = (),
) -> History:
    """Expand compactions in the stored items and repair them."""
    # Compactions first: a call or output that one covers must not be repaired.
    answered_next = _find_calls_answered_by(request, items)
    expanded = expand_compactions(items, sealer, project=project, answered_next=answered_next)
    last_response = request.previous_response_id
    repaired = repair_history(expanded.items, answered_next=answered_next, last_response=last_response)
    repairs = [*losses, *expanded.warnings, *repaired.repairs]
    return History(items=repaired.items, compacted=expanded.compacted, repairs=repairs, tools=tools)


def _find_calls_answered_by(request: CreateRequest, history: Sequence[Item | Unknown]) -> set[str]:
    """Return the ids of calls in the history that the request's input answers."""
    if not isinstance(request.input, list) or PAIRED_TYPES.isdisjoint(map(type, request.input)):
        return set()
    sent_again = {item.id for item in history if type(item) in PAIRED_TYPES and isinstance(item, CALL_TYPES)} - {
        None,
        "",
    }
    identified = identify_repeated_calls(request.input, request.input, history)
    return find_answered_calls([item for item in identified if item.id not in sent_again])


class _LoadedChain(NamedTuple):
    """The items of a response and all responses before it, its tools, and notes on lost items."""

    items: list[Item | Unknown]
    tools: list[Tool | Unknown] | None
    losses: list[str]


async def _load_chain(
    store: Store, project: str, response_id: str, *, with_tools: bool, share: HistoryShare | None
) -> _LoadedChain:
    chain = await store.load_chain(project, response_id, with_tools=with_tools, share=share)
    missing = response_id if not chain else chain[0].previous_response_id
    if missing is not None:
        raise _previous_not_found(missing)
    if not chain[-1].final:  # the history would silently lack its output
        raise InvalidRequest(
            f"Previous response with id '{response_id}' has not ended yet.",
            param="previous_response_id",
            code="previous_response_not_ended",
        )
    oldest, *later = chain
    earlier, losses = await _load_conversation_before(store, project, oldest, share)
    # A concurrent response may have added the same items to the conversation.
    known = {item.id: item for item in earlier}
    own = [item for item in oldest.items if item.id is None or known.get(item.id) != item]
    items = [*earlier, *own, *itertools.chain.from_iterable(link.items for link in later)]
    return _LoadedChain(items, chain[-1].tools, losses)


async def _load_conversation_before(
    store: Store, project: str, oldest: Link, share: HistoryShare | None
) -> tuple[list[Item | Unknown], list[str]]:
    """Return the conversation's items before the chain's oldest response, and a note if the conversation is lost."""
    if oldest.conversation is None:
        return [], []
    # A failed or cancelled response is not part of its conversation: then all of its items come before the response.
    items = await store.load_conversation_items(project, oldest.conversation, before=oldest.id, share=share)
    if items is None:
        return [], [f"the conversation {oldest.conversation} was deleted, with its items before {oldest.id}"]
    return items, []


def _previous_not_found(response_id: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{response_id}' not found. It is unknown here, deleted, expired, or was not "
        "stored: send the whole history in 'input' instead.",
        param="previous_response_id",
    )
