"""The deltas that a backend yields: a model's output without item ids, output indexes and event names.

A backend yields batches of deltas, and the composer turns them into the events of the Responses API. Items follow from
the order: `Text` after a `ToolCall` starts a new message, and `Text` after `Reasoning` starts the answer. Most backends
need only `Text`, `Reasoning`, `ToolCall`, `TokenUsage` and `Finish`.

Some deltas have the same name as the item or content part they add to. Modules that use both import this one as
`deltas`.
"""

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from antiphon.protocol import items
from antiphon.protocol.content import Annotation, LogProb
from antiphon.protocol.items import OutputItem
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown


class _Delta(msgspec.Struct, gc=False):
    """Base of all deltas. A delta is a value: do not change one after creating it."""


class Text(_Delta):
    """Text of the answer, appended to the open message. `logprobs` are those of the tokens in `text`."""

    text: str
    logprobs: tuple[LogProb, ...] = ()


class Annotate(_Delta):
    """An annotation, such as a citation, on the open text part."""

    annotation: Annotation | Unknown


class Refusal(_Delta):
    """Text of a refusal. It goes into a content part of its own in the open message."""

    text: str


class Reasoning(_Delta):
    """Text of the model's reasoning, appended to the open reasoning item."""

    text: str


class ReasoningSummary(_Delta):
    """Text of a reasoning summary. `index` is the number of the summary part, from 0."""

    text: str
    index: int = 0


class ReasoningSeal(_Delta):
    """The encrypted content of the open reasoning item, which clients send back. It closes the item.

    An empty string opens a reasoning item without closing it. `upstream_id` is the id of the item at an upstream, which
    expects it with the content.
    """

    encrypted_content: str
    upstream_id: str = ""


class ToolCall(_Delta):
    """The start of a function call, or more of its arguments.

    `key` identifies the call within the turn, for example by the upstream's index, so that calls may be interleaved.
    `name` is set once, best in the first delta of a key: the call is announced only then. `arguments` are appended.
    Without a `call_id` the composer creates one. `caller` is the program that makes the call, if it is not the model.
    `has_end` is set with the name if a `CloseItem` ends the call. The next call may close a call without it. More
    arguments of a closed call fail the response, unless they are blank.
    """

    key: int | str
    arguments: str = ""
    name: str = ""
    call_id: str | None = None
    namespace: str | None = None
    caller: JsonObject | None = None
    has_end: bool = False


class CustomToolCall(_Delta):
    """The start of a custom tool call, or more of its input. Like `ToolCall`, but `input` is free text."""

    key: int | str
    input: str = ""
    name: str = ""
    call_id: str | None = None
    namespace: str | None = None
    caller: JsonObject | None = None


class WholeItem(_Delta):
    """A complete output item: the call of a hosted tool, a compaction, an item of an unknown type.

    The composer adds a missing id.
    """

    item: OutputItem | Unknown


class Phase(_Delta):
    """The phase of the next message: commentary or the final answer."""

    phase: items.Phase


class NoStatus(_Delta):
    """The next reasoning item has no `status`, unless it is incomplete. OpenAI's reasoning items have none."""


class NewPart(_Delta):
    """The end of the open content part. The next text starts another part of the same item."""


class Amend(_Delta):
    """Further fields of an open item, as JSON by name. They are set when the item is closed.

    `key` is the key of a tool call or of an `OpenItem`. None means the open message or reasoning item.
    """

    fields: dict[str, msgspec.Raw]
    key: int | str | None = None


class OpenItem(_Delta):
    """The start of an item whose events the backend forwards from its upstream, with `ItemPassthrough` and `CloseItem`.

    Used for hosted tools and unknown item types. The composer gives the item a new id that starts with `prefix`.
    """

    key: int | str
    item: OutputItem | Unknown
    prefix: str = "item"


class ItemPassthrough(_Delta):
    """An upstream event about an open item. The composer replaces its ids, output index and sequence number.

    `key` is as in `Amend`.
    """

    event: Unknown
    key: int | str | None = None


class CloseItem(_Delta):
    """The end of an open item, before the end of the turn. `key` is as in `Amend`.

    `item` is the final form of an item that was started with `OpenItem`.
    """

    key: int | str | None = None
    item: OutputItem | Unknown | None = None
    ending: Literal["completed", "incomplete"] = "completed"


class Served(_Delta):
    """The model and the backend that serve the turn. If there are several, the last one is used.

    `named` is the name of the model that the upstream reports, if it differs.
    """

    model: str
    backend: str
    named: str | None = None


class TokenUsage(_Delta):
    """The token usage of the turn. If there are several, the last one is used.

    `is_open`: another model call of the turn has begun, and its tokens are not part of `usage`.
    """

    usage: Usage
    is_open: bool = False


class ToolUsage(_Delta):
    """The usage of a hosted tool that this server has run: web searches, and the `usage` of an images endpoint.

    The usages of a response add up.
    """

    searches: int = 0
    images: JsonObject | None = None


class Finish(_Delta):
    """The end of the turn and its reason. Every turn ends with exactly one `Finish` or `Failure`, and nothing follows.

    A backend yields `stop`, `length` or `content_filter`. The engine adds `cancelled` and, if the client steers the
    response, `steered`. `detail` replaces the reason in the response's `incomplete_details`.
    """

    reason: Literal["stop", "length", "content_filter", "cancelled", "steered"] = "stop"
    detail: str | None = None


class Failure(_Delta):
    """The end of the turn with an error. `type` is the error type that clients get, such as `rate_limit_error`."""

    message: str
    code: str = "server_error"
    type: str = "server_error"
    param: str | None = None


class Passthrough(_Delta):
    """An upstream event of an unknown type, forwarded with a new sequence number."""

    event: Unknown


KEYED_TYPES = (ToolCall, CustomToolCall, Amend, OpenItem, ItemPassthrough, CloseItem)
"""The deltas with a `key`, which names a call or an item of the answer."""

Delta = (
    Text
    | Annotate
    | Refusal
    | Reasoning
    | ReasoningSummary
    | ReasoningSeal
    | ToolCall
    | CustomToolCall
    | WholeItem
    | Phase
    | NoStatus
    | NewPart
    | Amend
    | OpenItem
    | ItemPassthrough
    | CloseItem
    | Served
    | TokenUsage
    | ToolUsage
    | Finish
    | Failure
    | Passthrough
)

Batch_co = TypeVar("Batch_co", covariant=True)


class ClosableIterator(Protocol[Batch_co]):
    """An async iterator that can be closed before its end. An async generator is one.

    After an error, the end or `aclose`, iteration only raises `StopAsyncIteration`.
    """

    def __aiter__(self) -> AsyncIterator[Batch_co]: ...

    def __anext__(self) -> Awaitable[Batch_co]: ...

    def aclose(self) -> Awaitable[None]:
        """Release what the iterator holds, such as a connection. A second call has no effect."""


Deltas = ClosableIterator[Sequence[Delta]]
