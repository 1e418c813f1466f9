"""What a store keeps, and the questions it answers. Every row belongs to a project, and every question names one.

The contract comes in parts: one for each kind of thing that is kept, and one for references to items. A store answers
them all. Questions that name no project are the server's own: `expire`, and the side of the run queue that works it
off.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from antiphon.errors import AntiphonError
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.limits import RunLimits

Order = Literal["asc", "desc"]

NO_LIMITS = RunLimits()


class LeaseLost(AntiphonError):
    """The run is no longer the writer's: another process took it over, or it has ended. Nothing was written.

    It tells a background run to stop. It is never sent to a client.
    """


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response with the input items it was asked with (only its own, not the chain's).

    From the second `expires_at` on, it is as if it had been deleted for whoever names it. What continues it reads it.
    """

    response: Response
    input: list[Item | Unknown]
    expires_at: int | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One response of a chain, cut down to what a continuation reads: its input items, then its output items.

    One that is not `final` yet still has its output to come. The first of a chain may belong to a `conversation`.
    """

    id: str
    previous_response_id: str | None
    final: bool
    items: list[Item | Unknown]
    conversation: str | None = None


class ItemRows(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a conversation's items, and whether there are more after it."""

    items: list[Item | Unknown]
    has_more: bool


class RunKey(NamedTuple):
    """Which run: that of this response."""

    project: str
    response_id: str


class ClaimedRun(NamedTuple):
    """A run that its owner shall work off. `request` is what `enqueue` was given.

    `attempt` is 1 for the first claim. `watched`: a reader was, or may have been, shown events of an earlier attempt.
    `cancelled`: its cancellation was requested. `interruptions`: how many of the earlier attempts were not ended in
    good order, by `release` or `put_back`. `model` is what the response names; `ours`: it was enqueued by this process,
    or by one that serves the same models.
    `free_since` is when it was enqueued or given back, or when its last owner's lease ran out.
    """

    project: str
    response_id: str
    request: bytes
    attempt: int
    watched: bool
    cancelled: bool
    interruptions: int
    model: str
    ours: bool
    free_since: float


class PromptVersion(NamedTuple):
    """One version of a prompt, without its body."""

    prompt_id: str
    version: str
    created_at: int


class StoredPrompt(NamedTuple):
    """One version of a prompt. `body` is what `save_prompt` was given."""

    version: str
    created_at: int
    body: bytes


class Responses(Protocol):
    async def save(
        self,
        project: str,
        stored: StoredResponse,
        *,
        conversation: str | None = None,
        owner: str | None = None,
        events: tuple[int, Sequence[bytes]] | None = None,
    ) -> None:
        """Keep a response, replacing an earlier version of the same id.

        The response is encoded before the first wait, and kept even if the caller is cancelled while waiting. A
        response with a final status has no run any more: its run goes in the same transaction. What is final stays:
        saving an unfinished state over it changes nothing.

        With a `conversation`, the input items and then the output items are appended to it in the same transaction, as
        `append_items` does with an answer, and it lives at least as long as the response. A response is appended once,
        however often it is saved. Raises NotFound if there is no such conversation; then nothing is saved. With an
        `owner`, raises LeaseLost unless the response's run is that owner's. `events` are the response's last events, as
        for `append_events`: they are kept in the same transaction.
        """

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        """One response, or None."""

    async def delete(self, project: str, response_id: str) -> bool:
        """Forget a response with its events and its run. False when there was none."""

    async def chain(self, project: str, response_id: str) -> Sequence[Link]:
        """The response and its ancestors through `previous_response_id`, oldest first.

        Empty when the response itself is unknown or has expired; its ancestors are read even if they have. An ancestor
        that was deleted ends the walk: the first element then still names a `previous_response_id`, and the caller
        decides what to make of the gap.
        """

    async def expire(self, now: int) -> int:
        """Delete what has expired, of every project: responses with their events and runs, conversations with their
        items. A response stays while one that was first kept after it continues it, expired or not, and goes with the
        last of those. It is done in steps, and other writers come in between. How many responses and conversations
        went.
        """


class Conversations(Protocol):
    async def create_conversation(
        self,
        project: str,
        conversation: Conversation,
        items: Sequence[Item | Unknown],
        *,
        expires_at: int | None = None,
    ) -> None:
        """Keep a new conversation with its first items."""

    async def load_conversation(self, project: str, conversation_id: str) -> Conversation | None:
        """One conversation, or None."""

    async def update_conversation(
        self, project: str, conversation_id: str, metadata: dict[str, str] | None
    ) -> Conversation | None:
        """Replace the metadata. The conversation as it is now, or None."""

    async def delete_conversation(self, project: str, conversation_id: str) -> bool:
        """Forget a conversation with its items. False when there was none."""

    async def append_items(
        self,
        project: str,
        conversation_id: str,
        items: Sequence[Item | Unknown],
        *,
        answer: Sequence[Item | Unknown] | None = None,
        expires_at: int | None = None,
    ) -> bool:
        """Append the items as one block: nobody else's come in between. False when there is no such conversation.

        With `expires_at` it lives until then: what is still being added to is not forgotten.

        Raises InvalidRequest if the conversation already has an item of the same id; then nothing is appended. Items
        without an id are kept and listed, but cannot be asked for.

        With an `answer`, they are what a response was asked with, and it comes behind them. It is too late to refuse
        anything then: an item that another response has brought meanwhile stays where it is, and another one of the
        same id is appended under a new id. So is all of the answer, whatever is there.
        """

    async def list_items(
        self, project: str, conversation_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        """Up to `limit` items that follow the item `after` in this order. None when there is no such conversation.

        Raises InvalidRequest, naming `after`, when the conversation has never had such an item. One that was deleted
        still has its place.
        """

    async def conversation_items(
        self, project: str, conversation_id: str, *, before: str | None = None
    ) -> list[Item | Unknown] | None:
        """All items, oldest first. None when there is no such conversation.

        With the id of a response in `before`, only those that were there when it was appended; all, if it never was.
        """

    async def load_item(self, project: str, conversation_id: str, item_id: str) -> Item | Unknown | None:
        """One item of a conversation, or None."""

    async def delete_item(self, project: str, conversation_id: str, item_id: str) -> bool:
        """Take an item out of a conversation. False when it was not there."""


class References(Protocol):
    async def load_outputs(self, project: str, response_ids: Sequence[str]) -> list[Item | Unknown]:
        """The output items of those of these responses that there are."""

    async def find_item(self, project: str, item_id: str) -> Item | Unknown | None:
        """The item with this id in whichever of the project's responses has it, or else of its conversations, or None.

        If several have one, it is that of the newest response, or the one appended last. Items that were made in a
        response that was kept by then are not found in others: their ids say where they are, and they go with it.
        """


class EventLog(Protocol):
    """The events of a response as they were sent, so that a reader can come back and go on from any number."""

    async def append_events(
        self, project: str, response_id: str, first: int, payloads: Sequence[bytes], *, owner: str | None = None
    ) -> bool:
        """Keep a batch: the JSON of consecutive events, numbered from `first`; none has a line break in it.

        False, and nothing is kept, when the response is not stored or, with an `owner`, its run is not that owner's.
        Raises ServerError if the log already reaches `first`: there are never two events under one number.
        """

    async def read_events(self, project: str, response_id: str, after: int) -> list[tuple[int, bytes]]:
        """The events with a number greater than `after`, in order, each with its number. -1 asks for all."""

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        """Forget a response's events, so that its numbers can be given again.

        With an `owner`, only if its run is that owner's and nobody has watched it: False otherwise. This is decided in
        the same transaction, so a reader either comes first and keeps what it is shown, or finds nothing.
        """


class RunQueue(Protocol):
    """Background runs: who works on which response. The processes that share a store share its queue.

    An owner is one life of one process, with a name that never comes again. Its hold on a run is a lease: if it does
    not renew it in time, another owner may claim the run, and from then on nothing that the first one writes is kept.

    `home` names all processes that serve the same models: a run that one of them enqueued is ours to each of them.
    """

    home: str

    async def enqueue(self, project: str, stored: StoredResponse, request: bytes) -> None:
        """Keep a new response and its run, in one transaction. `request` is handed back by `claim` as it is."""

    async def claim(
        self,
        owner: str,
        *,
        as_of: float,
        lease: float,
        limit: int,
        patience: Mapping[str, float] | None = None,
        limits: RunLimits = NO_LIMITS,
    ) -> list[ClaimedRun]:
        """Take up to `limit` runs for `lease` seconds, oldest first.

        A run can be taken if it has no owner, if another owner's lease had expired at `as_of`, or if that owner's
        process is known to be dead. `as_of` is the time at which the caller began to wait for the store: other owners
        that had to wait too could not renew meanwhile. The lease begins when the run is taken.

        Runs of the models in `patience` are left to other processes, unless they are ours, until they have been free
        for that many seconds.

        `limits` are counted over all processes, in the transaction that takes the runs. A run in progress is one whose
        owner holds its lease. Runs of a project at its limit are skipped. Taking over or repeating a run is not a
        start.

        Runs whose cancellation was requested are all taken: they count against no limit, because they need no model.
        """

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        """Hold all runs of this owner for `lease` seconds more. Which they are, and whether their cancellation was
        requested.

        One that its owner works on and that is not among them was taken over, or deleted with its response. A lease of
        any owner that lasts longer than it was meant to, since the clock was set back, begins anew.
        """

    async def release(self, owner: str) -> None:
        """Give back all runs of this owner: others can claim them at once."""

    async def put_back(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        """Give back one run of this owner as if it had never had it: others can claim it, as free since then."""

    async def abandon(self, owner: str, project: str, response_id: str) -> None:
        """Stop working on one of this owner's runs without ending it: it is free for anyone, us too, when its lease
        runs out. Without this, renewing would hold it for ever."""

    async def watch(self, project: str, response_id: str) -> bool:
        """Record, before a reader is shown events, that they are to stay true. False when there is no run."""

    async def request_cancel(self, project: str, response_id: str) -> bool:
        """Ask whoever has the run, or will have it, to end it. False when there is no run."""


class Prompts(Protocol):
    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        """Keep a new version of a prompt. Versions do not change: raises InvalidRequest if there is this one."""

    async def load_prompt(self, project: str, prompt_id: str, version: str | None) -> StoredPrompt | None:
        """This version, or None; for None, the version that was saved last."""

    async def list_prompts(self, project: str) -> list[PromptVersion]:
        """Every version of every prompt: by id, then in the order in which they were saved."""

    async def delete_prompt(self, project: str, prompt_id: str) -> bool:
        """Forget a prompt with all its versions. False when there was none."""


class Store(Responses, Conversations, References, EventLog, RunQueue, Prompts, Protocol):
    """A place for everything that outlives a request.

    A question that changes something returns once the change is durable: whatever was acknowledged survives a crash.
    Stores hand out fresh objects: changing one does not change what is kept. What has expired is not shown,
    except in the chain of what continues it. Before `open` and after `close`, every question raises Unavailable; a
    store that breaks (a full disk, a damaged row) raises ServerError.
    """

    async def open(self) -> None:
        """Connect and bring the schema up to date. Called once. Raises ConfigError when there is no way in."""

    async def close(self) -> None:
        """Finish what is queued and disconnect."""
