"""The small vocabulary a backend speaks: what a model says, with no ids, no indexes and no event names.

A backend yields batches of these; the composer turns them into the Responses API's events. Order carries the meaning:
text after a tool call is a second message, text after reasoning is the answer.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Literal

import msgspec

from antiphon.protocol import items
from antiphon.protocol.content import Annotation, LogProb
from antiphon.protocol.items import OutputItem
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown


class _Delta(msgspec.Struct, gc=False):
    """Deltas are values: nobody changes one after it was made."""


class Text(_Delta):
    """More of the answer's text. `logprobs` describe exactly the tokens of `text`."""

    text: str
    logprobs: tuple[LogProb, ...] = ()


class Annotate(_Delta):
    """A citation on the text so far."""

    annotation: Annotation | Unknown


class Refusal(_Delta):
    """More of a refusal, which is a content part of its own."""

    text: str


class Reasoning(_Delta):
    """More of the model's raw reasoning."""

    text: str


class ReasoningSummary(_Delta):
    """More of a reasoning summary; `index` numbers the summary's parts from 0."""

    text: str
    index: int = 0


class ReasoningSeal(_Delta):
    """The opaque form of the reasoning so far, for clients that keep the state themselves. It ends its item."""

    encrypted_content: str


class ToolCall(_Delta):
    """A function call, or more of one.

    `key` names the call within this answer (a backend's own index or id), so that interleaved calls stay apart.
    `name` comes once, best with the first delta of a key; `arguments` are appended. Without a `call_id` the composer
    makes one.
    """

    key: int | str
    arguments: str = ""
    name: str = ""
    call_id: str | None = None
    namespace: str | None = None


class CustomToolCall(_Delta):
    """A custom tool call, or more of one: like `ToolCall`, with free text for input."""

    key: int | str
    input: str = ""
    name: str = ""
    call_id: str | None = None
    namespace: str | None = None


class WholeItem(_Delta):
    """An output item that arrives complete (a hosted tool's receipt, a compaction, an item of an unknown type)."""

    item: OutputItem | Unknown


class Phase(_Delta):
    """What the message that comes next is for."""

    phase: items.Phase


class NewPart(_Delta):
    """What is said next is a content part of its own, in the same item."""


class Amend(_Delta):
    """Fields that the item has beyond what was said of it: as JSON, by name. They hold when the item is whole.

    Without a `key` it is the item that is being said, else the call of that key.
    """

    fields: dict[str, msgspec.Raw]
    key: int | str | None = None


class OpenItem(_Delta):
    """An output item under way whose life the backend tells itself: that of a hosted tool, or of an unknown type.

    Its id becomes one of ours, which begins with `prefix`.
    """

    key: int | str
    item: OutputItem | Unknown
    prefix: str = "item"


class ItemEvent(_Delta):
    """An event about an item, as it came; ids, index and number become ours. Without a `key`: what is being said."""

    event: Unknown
    key: int | str | None = None


class CloseItem(_Delta):
    """An item is whole, though others may follow: the one of this `key`, or without one what is being said.

    `item` is what one that was opened with `OpenItem` has come to.
    """

    key: int | str | None = None
    item: OutputItem | Unknown | None = None
    ending: Literal["completed", "incomplete"] = "completed"


class Served(_Delta):
    """Who answers: the model as it is called by the backend of this name. It may come before anything else is said.

    `named` is what the backend's server calls the model that has answered, if it says another name.
    """

    model: str
    backend: str
    named: str | None = None


class TokenUsage(_Delta):
    """The turn's token usage. The last one counts."""

    usage: Usage


class Finish(_Delta):
    """The turn is over, and why. Exactly one `Finish` or `Failure` ends every turn; nothing may follow it.

    A backend says why its model stopped; `cancelled` is the engine's word for a turn that was no longer wanted,
    and `steered` for one that the client has more to say to. If the
    answer is incomplete for a reason that the API has another word for, `detail` is that word.
    """

    reason: Literal["stop", "length", "content_filter", "cancelled", "steered"] = "stop"
    detail: str | None = None


class Failure(_Delta):
    """The model broke off. `type` is the error family (`server_error`, `rate_limit_error`, …) that clients see."""

    message: str
    code: str = "server_error"
    type: str = "server_error"
    param: str | None = None


class Passthrough(_Delta):
    """An event of a type we do not know, from a backend that already speaks Responses: forwarded in its place."""

    event: Unknown


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
    | NewPart
    | Amend
    | OpenItem
    | ItemEvent
    | CloseItem
    | Served
    | TokenUsage
    | Finish
    | Failure
    | Passthrough
)

Deltas = AsyncGenerator[Sequence[Delta], None]
