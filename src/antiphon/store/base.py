"""The protocol of a store, and the types it takes and returns.

The protocol has one part for each kind of stored data, and one for references to items. Every row belongs to a project,
and every method takes one, except those that serve the server itself: `expire`, the methods for API keys, projects and
usage, and the methods with which workers take runs from the queue.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from antiphon.errors import AntiphonError, StoreUnavailable
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.store.changes import Announcement, OnChange
from antiphon.store.encoded_response import EncodedResponse
from antiphon.store.keys import KeyStore
from antiphon.store.limits import RunLimits
from antiphon.store.peer_link import StorePeerLink
from antiphon.store.prompts import PromptStore
from antiphon.store.usage import ProjectStore, UsageStore
from antiphon.store.write_observer import OnWrite

if TYPE_CHECKING:
    from antiphon.store.history_budget import HistoryShare

Order = Literal["asc", "desc"]

NO_LIMITS = RunLimits()

# Length of the random part of a response id. The ids of the items of a response begin with it, after their prefix.
TOKEN_LENGTH = 44


def parse_response_id(item_id: str) -> str | None:
    """Return the id of the response that produced an item, or None if the server did not make the item id."""
    _, _, rest = item_id.partition("_")
    return f"resp_{rest[:TOKEN_LENGTH]}" if len(rest) > TOKEN_LENGTH else None


class LeaseLost(AntiphonError):
    """The writer does not own the run: another process claimed it, or it has ended. Nothing was written.

    A worker stops the run when it gets this error. Clients never receive it.
    """


class QueueFull(AntiphonError):
    """A run was not accepted, because `waiting` runs wait already: of the project, or of all projects."""

    def __init__(self, waiting: int, *, is_project: bool) -> None:
        super().__init__(f"{waiting} background responses are waiting.")
        self.waiting = waiting
        self.is_project = is_project


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response with the input items of its request, without those of earlier responses.

    From `expires_at` on (seconds since 1970) it cannot be loaded or continued. Responses that continue it still read
    it. If `has_own_ids` is set, the ids of all input items contain that of the response. If `encoded` is given, `save`
    may set the JSON in it.
    """

    response: Response
    input: list[Item | Unknown]
    expires_at: int | None = None
    has_own_ids: bool = False
    encoded: EncodedResponse | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One response of a chain: its input items, followed by its output items.

    The output is incomplete unless `final` is true. Only the first response of a chain can have a `conversation`, and
    only the last one `tools`. Links of several results may share their items: do not change them.
    """

    id: str
    previous_response_id: str | None
    final: bool
    items: tuple[Item | Unknown, ...]
    conversation: str | None = None
    tools: list[Tool | Unknown] | None = None


class ItemRows(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the items of a conversation, or of a response's input. `has_more`: there are items after it."""

    items: list[Item | Unknown]
    has_more: bool


class RunKey(NamedTuple):
    """The key of a background run."""

    project: str
    response_id: str


class ClaimedRun(NamedTuple):
    """A run claimed by an owner. `request` has the bytes given to `enqueue`.

    `attempt` is 1 for the first claim. `watched`: a reader may have seen events of an earlier attempt. `cancelled`:
    cancellation was requested. `interruptions`: number of earlier attempts that ended neither with `release` nor with
    `return_run`, for example by a crash, and were not withdrawn. `model` is the model of the response.
    `same_configuration`: a process with the same `configuration_id` enqueued the run. `free_since`: the time at which
    the run was enqueued or released, or at which the lease of its last owner expired.
    """

    project: str
    response_id: str
    request: bytes
    attempt: int
    watched: bool
    cancelled: bool
    interruptions: int
    model: str
    same_configuration: bool
    free_since: float


class ResponseStore(Protocol):
    async def save(
        self,
        project: str,
        stored: StoredResponse,
        *,
        conversation: str | None = None,
        owner: str | None = None,
        events: tuple[int, Sequence[bytes]] | None = None,
    ) -> None:
        """Save a response, replacing an earlier version of the same id.

        The response is encoded before the first wait, and saved even if the caller is cancelled while waiting. Saving
        a final status deletes the run of the response in the same transaction. Saving an unfinished status over a
        final one changes nothing.

        With a `conversation`, the input items and then the output items are appended to it in the same transaction, as
        by `append_items` with `answer`. The conversation then expires no earlier than the response. A response is
        appended once, however often it is saved. Raises NotFound if there is no such conversation; nothing is saved
        then. With an `owner`, raises LeaseLost unless that owner has the run of the response. `events` are the last
        events of the response, as for `append_events`. They are written in the same transaction.
        """

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        """Return a response, or None if there is none."""

    async def load_response(self, project: str, response_id: str) -> Response | None:
        """Return a response without reading its input items, or None if there is none."""

    async def load_bare_response(self, project: str, response_id: str) -> Response | None:
        """Return a response with an empty output, or None if there is none. Items are not read."""

    async def list_input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        """Return up to `limit` input items of a response that follow the item `after`. None if there is no response.

        Raises InvalidRequest for `after` if the input has no such item. Only the items of the page are decoded.
        """

    async def delete(self, project: str, response_id: str) -> bool:
        """Delete a response with its events and its run. Return False if there was none."""

    async def load_chain(
        self, project: str, response_id: str, *, with_tools: bool = False, share: "HistoryShare | None" = None
    ) -> Sequence[Link]:
        """Return the response and its ancestors through `previous_response_id`, oldest first.

        The memory is reserved in `share` before large items are read. So do the other methods with a `share`.

        With `with_tools`, the last element has the tools of the response, if there are any.
        The result is empty if the response is unknown or has expired. Expired ancestors are included. A deleted
        ancestor ends the chain: the first element then has a `previous_response_id`, and the caller decides how to
        handle the gap.
        """

    async def expire(self, now: int) -> int:
        """Delete expired responses and conversations of all projects. Return how many were deleted.

        Events, runs and items are deleted with them. An expired response stays while a response that was first saved
        after it continues it, and is deleted with the last of those. The work is done in steps, so that other writers
        do not wait for all of it. If our clock is more than a minute ahead of that of the database, `now` is corrected.
        """

    async def shrink(self) -> int:
        """Return unused space to the file system, in small steps. Return the number of bytes."""


class ConversationStore(Protocol):
    async def create_conversation(
        self,
        project: str,
        conversation: Conversation,
        items: Sequence[Item | Unknown],
        *,
        expires_at: int | None = None,
    ) -> None:
        """Save a new conversation with its first items."""

    async def load_conversation(self, project: str, conversation_id: str) -> Conversation | None:
        """Return a conversation, or None if there is none."""

    async def update_conversation(
        self, project: str, conversation_id: str, metadata: dict[str, str] | None
    ) -> Conversation | None:
        """Replace the metadata. Return the changed conversation, or None if there is none."""

    async def delete_conversation(self, project: str, conversation_id: str) -> bool:
        """Delete a conversation with its items. Return False if there was none."""

    async def append_items(
        self,
        project: str,
        conversation_id: str,
        items: Sequence[Item | Unknown],
        *,
        answer: Sequence[Item | Unknown] | None = None,
        expires_at: int | None = None,
    ) -> bool:
        """Append items as one contiguous block. Return False if there is no such conversation.

        With `expires_at`, the conversation expires no earlier than then.

        Raises InvalidRequest if the conversation already has an item of the same id; nothing is appended then. Items
        without an id are stored and listed, but `load_item` cannot return them.

        With an `answer`, `items` are the input of a response, and `answer` is its output, which is appended after them.
        Duplicate ids are then no error, because the response exists already: an input item equal to the stored one is
        skipped, and any other item of a known id is appended under a new id.
        """

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        """Return up to `limit` items that follow the item `after`, or None if there is no such conversation.

        There may be fewer, with `has_more`, if they are large (`record.PAGE_BYTES`). Raises InvalidRequest for `after`
        if the conversation never had such an item. A deleted item keeps its position.
        """

    async def load_conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None, share: "HistoryShare | None" = None
    ) -> list[Item | Unknown] | None:
        """Return all items, oldest first, or None if there is no such conversation.

        With a response id in `before`, return only the items that precede that response. If it was never appended,
        return all.
        """

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        """Return an item of a conversation, or None if there is none."""

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        """Delete an item of a conversation. Return False if there was none."""


class ReferenceStore(Protocol):
    async def load_outputs(
        self, project: str, response_ids: Sequence[str], *, share: "HistoryShare | None" = None
    ) -> list[Item | Unknown]:
        """Return the output items of the given responses. Unknown and expired responses are skipped."""

    async def load_items(
        self, project: str, item_ids: Collection[str], *, share: "HistoryShare | None" = None
    ) -> dict[str, Item | Unknown]:
        """Return the items with these ids. Ids without an item are missing from the result.

        An item is taken from the stored response that produced it, with its input and output. Others are found as by
        `find_item`. A response is read and decoded once, however many of its items are requested.
        """

    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        """Return the item with this id from a response of the project, else from a conversation, else None.

        If several match, return the one of the newest response, or the one appended last to a conversation. An item
        that a stored response produced is not searched in other responses: `parse_response_id` gives its response, and
        the item is deleted with it.
        """


class EventLog(Protocol):
    """The events of a response as they were sent, so that a reader can reconnect and continue from any number."""

    async def append_events(
        self, project: str, response_id: str, first: int, payloads: Sequence[bytes], *, owner: str | None = None
    ) -> bool:
        """Append the JSON of consecutive events, numbered from `first`. None may contain a line break.

        Return False, and write nothing, if the response is not stored or if `owner` is given and does not have the
        run. Raises ServerError if the log already reaches `first`: a number is never used for two events.
        """

    async def read_events(
        self, project: str, response_id: str, after: int, *, max_bytes: int | None = None
    ) -> list[tuple[int, bytes]]:
        """Return the events with a number greater than `after`, in order, with their numbers. Use -1 for all.

        With `max_bytes`, return only the first of them, up to this size together. One event is always returned, however
        large it is. An empty result means that there are no more.
        """

    async def search_events(
        self, project: str, response_id: str, text: bytes, *, start: int
    ) -> list[tuple[int, bytes]]:
        """Return the batches of the log that contain `text`, the newest batch, and the one that ends with `start`.

        A batch is the number of its last event, and its events, one per line. Batches before `start` are not read.
        """

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        """Delete the events of a response, so that its numbers can be used again.

        With an `owner`, return False and delete nothing unless that owner has the run and no reader has watched it.
        The check is part of the transaction: a reader either marks the run first, or finds no events.
        """


class RunQueue(Protocol):
    """The queue of background runs, shared by all processes that use one store.

    An owner is one worker in one process. The name of an owner is never used again. An owner holds a run by a lease. If
    it does not renew the lease in time, another owner can claim the run, and later writes of the first owner are
    rejected.

    `configuration_id` is an identifier shared by all processes that serve the same models.

    `on_change` is called for changes by any process, if the store reports them: for queued and cancelled runs, for the
    end and the deletion of a response, for lost reports, and for `announce`. A report is a hint: the change is
    committed, but some changes are not reported. `reports_changes` is False if no reports are expected now.
    """

    configuration_id: str
    on_change: OnChange | None

    @property
    def reports_changes(self) -> bool: ...

    def announce(self, announcement: Announcement) -> None:
        """Report a change to all processes, later and without a guarantee. Do nothing if the store reports none."""

    async def enqueue(
        self,
        project: str,
        stored: StoredResponse,
        request: bytes,
        *,
        limits: RunLimits = NO_LIMITS,
        watched: bool = False,
    ) -> None:
        """Save a new response and its run in one transaction. `claim` returns `request` unchanged.

        `watched`: a reader will follow the run, as by `mark_watched`.

        Raises QueueFull, and saves nothing, if the queue is as long as `limits` allow.
        """

    async def claim(
        self,
        owner: str,
        *,
        as_of: float,
        lease: float,
        limit: int,
        wait_by_model: Mapping[str, float] | None = None,
        limits: RunLimits = NO_LIMITS,
    ) -> list[ClaimedRun]:
        """Claim up to `limit` runs for `lease` seconds.

        The next run is always one of the project with the fewest runs in progress, and the oldest run of this project.

        A run can be claimed if it has no owner, if another owner's lease had expired at `as_of`, or if that owner's
        process is dead. `as_of` is the time at which the caller began to wait for the store: owners that waited for the
        store too could not renew in that time. The lease starts when the run is claimed.

        A run that was enqueued under another `configuration_id` is skipped until it has been free for the number of
        seconds that `wait_by_model` has for its model.

        `limits` are counted over all processes, in the transaction that claims the runs. A run is in progress while
        its owner holds the lease. Runs of a project at its limit are skipped. Only a first attempt is a start.

        An owner holds one run with `SUSPECT_INTERRUPTIONS` at a time: if its process dies again, no other is blamed.

        All cancelled runs are claimed. They count against no limit, because they need no model.
        """

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        """Renew the leases of this owner for `lease` seconds. Return its runs; the value is True if cancelled.

        A run missing from the result was claimed by another owner, or deleted with its response. If the clock was set
        back, leases of any owner that end too late are shortened to `lease` seconds from now.
        """

    async def release(self, owner: str) -> None:
        """Release all runs of this owner. Others can claim them at once."""

    async def end_leases(self, owner: str) -> None:
        """End the leases of a process that has died: others can claim its runs as if the leases had expired."""

    async def return_run(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        """Return a run that this owner did not start to the queue. It counts as free since `free_since`.

        With a time in the future, up to a minute, it cannot be claimed before that time. Other runs of its project can.
        """

    async def stop_renewing(self, owner: str, project: str, response_id: str) -> None:
        """Stop renewing the lease of one run of this owner, without ending the run.

        Any owner, including this one, can claim the run when the lease expires.
        """

    async def withdraw_interruption(self, project: str, response_id: str, *, attempt: int) -> bool:
        """Do not count the loss of a run during this attempt: its process lives. Return False if nothing changed."""

    async def mark_watched(self, project: str, response_id: str) -> bool:
        """Record that a reader follows the run, so that events it may read stay. Return False if there is no run."""

    async def request_cancel(self, project: str, response_id: str) -> bool:
        """Ask the current or next owner of a run to end it. Return False if there is no run."""

    async def count_waiting(self) -> int:
        """Return the number of runs without an owner that are not cancelled."""


class HostedStepStore(Protocol):
    """The finished steps of background responses with hosted tools, and claims of effects."""

    async def append_hosted_steps(
        self, project: str, response_id: str, first: int, steps: Sequence[bytes], *, owner: str
    ) -> bool:
        """Append the steps of a background response, numbered from `first`, in one transaction.

        Return False, and write nothing, unless `owner` has the run. Steps that the last call has stored are not stored
        again: it may have got no answer. Raises ServerError if the response otherwise does not have exactly `first`
        steps. The steps are deleted with the run.
        """

    async def load_hosted_steps(self, project: str, response_id: str) -> list[bytes]:
        """Return the steps of a background response in order."""

    async def claim_effect(self, project: str, key: str, *, expires_at: int | None = None) -> bool:
        """Record that an effect is about to happen. Return False if its key was claimed before.

        After `expires_at`, the claim may be deleted by `expire`.
        """


class Store(
    ResponseStore,
    ConversationStore,
    ReferenceStore,
    EventLog,
    RunQueue,
    HostedStepStore,
    PromptStore,
    KeyStore,
    ProjectStore,
    UsageStore,
    Protocol,
):
    """Storage for all data that outlives a request.

    A method that changes data returns when the change is durable: acknowledged writes survive a crash. Returned objects
    are copies, except the items of a `Link`: changing one does not change stored data. Expired data is not returned,
    except in the chain of a response that continues it. Before `open` and after `close` every method raises
    Unavailable. A damaged row raises ServerError, and a failure of the storage, such as a full disk, StoreUnavailable.
    The store logs such a failure once.

    `on_write` is called for each batch of writes. It must be set before `open`. `peer_link` is the connection to other
    processes with this store, from `open` on. None if the store does not connect processes.
    """

    on_write: OnWrite | None

    @property
    def peer_link(self) -> StorePeerLink | None: ...

    async def open(self) -> None:
        """Connect and migrate the schema. Called once. Raises ConfigError if the storage cannot be opened."""

    async def close(self) -> None:
        """Finish queued writes and disconnect."""

    @property
    def failure(self) -> StoreUnavailable | None:
        """The error of the last write, if the storage failed and no later write has succeeded."""

    async def check(self) -> None:
        """Raise StoreUnavailable if nothing can be stored now, because the disk is full or the files are lost.

        This is cheap, and the result may be a second old. After a failure it tries to write.
        """
