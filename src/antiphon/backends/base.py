"""The interface of backends: a backend takes a `Turn` and yields batches of deltas."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import msgspec

from antiphon.config.settings import GrammarLimits
from antiphon.errors import ConfigError
from antiphon.protocol import validation
from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Delta, Deltas
from antiphon.stream.limits import AnswerLimits
from antiphon.turn_queue import Slot, TurnQueue
from antiphon.upstream.addresses import OutboundRules


class TurnProgress(msgspec.Struct):
    """The progress of a turn, which all its copies share.

    `is_sent`: a model call whose usage is not reported yet has begun, or may have begun.
    `item_count` is the number of output items before the first call.
    """

    is_sent: bool = False
    item_count: int = 0

    def mark_sent(self) -> None:
        self.is_sent = True


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: the request, and the whole context that the model reads.

    An error about an item names it by its index in `items`, as in `input[3]`. The engine translates this to the
    client's param path.
    """

    request: CreateRequest
    """Its `tools` and `tool_choice` are resolved and validated. Do not read `input`: it has only the newest items."""

    items: list[Item | Unknown]
    """The context in order: the stored history, then this request's input, without `request.instructions`."""

    project: str = ""
    """The owner of the turn."""

    response_id: str = ""
    """The id of the response that the turn belongs to. Empty if there is none."""

    may_be_repeated: bool = False
    """True if a crash of the process repeats the turn. Readers can continue if the same `response_id` gets the same
    answer."""

    streamed: bool = True
    """False if the answer is read only when it is complete: a backend may then yield it in one batch."""

    background: bool = False
    """True if the turn waits behind the others in the backend's queue."""

    grammar_limits: GrammarLimits = GrammarLimits()
    """The limits on schemas and grammars that a backend compiles itself."""

    is_suspect: bool = False
    """True if the process of an earlier attempt at this turn has died, so that the turn may be the cause."""

    find_param: Callable[[Item | Unknown], str | None] | None = None
    """Returns the client's param path of an item."""

    warnings: list[str] = msgspec.field(default_factory=list)
    """Warnings for the client. A stage or a backend may append to them before `stream` returns."""

    progress: TurnProgress = msgspec.field(default_factory=TurnProgress)
    """The turn is marked when `stream` returns. A backend that waits for an answer there marks it when it sends the
    request."""

    on_accepted: Callable[[], object] | None = None
    """Called by a backend when another server has accepted the request, at the latest with the first delta."""

    load_deferred: Callable[[], Awaitable[tuple[list[Tool | Unknown], list[Delta]]]] | None = None
    """Loads the tools of the empty namespaces in `request.tools`, before the first tool search of the turn.

    It returns the tools, and the deltas of the items that list them.
    """

    limits: AnswerLimits = AnswerLimits()
    """A backend that reads an answer of unknown size stops it here, with `limits.make_error`.

    The engine checks the deltas against them, too.
    """

    outbound: OutboundRules = OutboundRules()
    """The rules for URLs in `items` that another server fetches."""

    text_items: list[Item | Unknown] | None = None
    """The same list as `items` if the engine has found no media in it."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The features that a backend supports itself. The engine emulates others, or rejects them by name."""

    tools: frozenset[str] = frozenset()
    """The tool types that the backend accepts unchanged."""

    any_tool: bool = False
    """The backend accepts every tool type, and executes tools that are not the client's."""

    any_model: bool = False
    """The backend serves more models than it lists."""

    context_window: int | None = None
    """The context size of the models that are not listed, if known."""

    json_schema: bool = False
    verify_json_schema: bool = False
    """Another server claims to support `json_schema`, so the output is validated again."""

    images: bool = False
    files: bool = False
    file_ids: bool = False
    """The backend takes ids of files that this server does not have, or rejects them itself."""

    file_urls: bool = False
    """The backend takes the URLs of files."""

    audio: bool = False
    video: bool = False
    logprobs: bool = False
    penalties: bool = False
    reasoning: bool = False
    list_ignored: Callable[[CreateRequest, str], Sequence[str]] | None = None
    """Returns the parameters of a request without effect on the named model."""

    check_schemas: Callable[[CreateRequest, GrammarLimits], Awaitable[None]] | None = None
    """Raises InvalidRequest for a malformed or too large schema, in a backend that compiles schemas."""


# These concern a backend and its server, not the abilities of a model.
_NO_FEATURES = frozenset({"any_model", "verify_json_schema", "file_ids", "file_urls"})
_FEATURES: dict[str, Any] = {
    field.name: True
    for field in msgspec.structs.fields(Capabilities)
    if field.default is False and field.name not in _NO_FEATURES
}
ALL_CAPABILITIES = Capabilities(tools=frozenset({"function"}), **_FEATURES)

_HINTS = (
    "client_metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)
_get_hints = attrgetter(*_HINTS)
_NO_HINTS = (None,) * len(_HINTS)


def list_hint_parameters(request: CreateRequest) -> list[str]:
    """Return the parameters of a request that do not change the answer, for `Capabilities.list_ignored`."""
    values = _get_hints(request)
    hints: list[str] = []
    if values != _NO_HINTS:  # most requests have none
        hints = [name for name, value in zip(_HINTS, values, strict=True) if value not in (None, {})]
        if request.service_tier in ("auto", "default"):  # these request nothing
            hints.remove("service_tier")
    if request.text is not None and request.text.verbosity is not None:
        hints.append("text.verbosity")
    return hints


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model a backend serves.

    `temperature` and `top_p` are the defaults for requests that do not set them. None leaves them to the model.
    """

    id: str
    created: int
    owned_by: str
    context_window: int | None = None
    temperature: float | None = None
    top_p: float | None = None


class Backend(Protocol):
    """A provider of models.

    `stream` is awaited, then iterated. The await raises errors that reject the turn (a context that is too long, an
    invalid request): the client then gets an ordinary HTTP error, or the next candidate serves the request. A backend
    that calls another server therefore returns when the first deltas have arrived. Each batch has the deltas that
    arrived together, and is sent in one write. Closing the generator stops the model promptly. The last delta of the
    last batch is `Finish` or `Failure`; a raised error is a failure too.
    """

    capabilities: Capabilities

    async def start(self) -> None:
        """Load weights, open connections. Called once, before the first turn."""

    async def close(self) -> None:
        """Release everything. Called once, after the last turn."""

    def models(self) -> Sequence[Model]:
        """Return the models that are known now."""

    def stream(self, turn: Turn) -> Awaitable[Deltas]:
        """Start the turn and return its deltas. May be an `async` method, or return an awaitable."""

    async def count_tokens(self, turn: Turn) -> int:
        """Return the number of input tokens of this turn."""


@runtime_checkable
class QueuedBackend(Protocol):
    """A backend that runs a limited number of turns at once. The engine sets the limits of its queue."""

    @property
    def queue(self) -> TurnQueue | None:
        """The queue, or None if the number of turns is not limited."""


class SlotDeltas:
    """The deltas of a turn that holds a slot of a queue. The slot is free when the deltas end or are closed."""

    def __init__(self, deltas: Deltas, slot: Slot) -> None:
        self._deltas = deltas
        self._slot = slot
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        try:
            return await anext(self._deltas)
        except BaseException:
            self._slot.release()
            raise

    async def aclose(self) -> None:
        try:
            await self._deltas.aclose()
        finally:
            self._slot.release()

    def __del__(self) -> None:
        # Deltas that were garbage collected without `aclose` must not hold their slot.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._slot.release)


Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(options: Mapping[str, Any], kind: type[Options], *, name: str) -> Options:
    """Parse the options of the backend `name`.

    Raises ConfigError, for example `backends.local.threads: Expected int, got str`.
    """
    where = f"backends.{name}"
    known = kind.__struct_encode_fields__
    for option in options:
        if option not in known:
            raise ConfigError(f"{where}.{option}: unknown option; known are: {', '.join(known) or 'none'}")
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise locate_config_error(error, where) from None


def locate_config_error(error: msgspec.ValidationError, where: str) -> ConfigError:
    """Return the error with the full path of the wrong setting."""
    fault = validation.parse_error(error)
    dot = "." if fault.path and not fault.path.startswith("[") else ""
    return ConfigError(f"{where}{dot}{fault.path}: {fault.reason.replace('`', '')}")
