"""What a backend is: it takes a `Turn` and yields batches of deltas. One file per upstream implements this."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from antiphon.errors import ConfigError
from antiphon.protocol import validation
from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Deltas


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a model: the request, and everything the model is to read before it answers.

    `items` is the whole context in order: the stored chain, then this request's input. `request.instructions` is not
    among them, and `request.input` is not to be read: it holds only the newest part. `request.tools` and
    `request.tool_choice` are already resolved and checked. `project` is whose turn it is. `response_id` is there if a
    crash would have the turn begun again: a backend that says the same for the same id lets its readers go on.

    A backend that refuses an item names it `input[3]`, by its place among the `items`. What the client calls that is
    not its to know: `find_param` says it, if anybody can, to whoever tells the client.

    A stage or a backend may append to `warnings` before `stream` returns. The client gets them with the response.
    """

    request: CreateRequest
    items: list[Item | Unknown]
    project: str = ""
    response_id: str = ""
    find_param: Callable[[Item | Unknown], str | None] | None = None
    warnings: list[str] = msgspec.field(default_factory=list)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend does itself. What it lacks, the engine emulates where that can be done, and refuses by name else.

    `tools` are the types of tools it takes as they are. One with `any_tool` takes every tool, whatever its type, and
    runs those that are not the client's to run. One with `any_model` answers for more models than it lists, and
    `context_window` is what those can read, if that is known. With `verify_json_schema`, `json_schema` is the word of
    another server, and its output is validated again. `list_ignored` returns the parameters of a request that
    have no effect on the named model.
    """

    tools: frozenset[str] = frozenset()
    any_tool: bool = False
    any_model: bool = False
    context_window: int | None = None
    json_schema: bool = False
    verify_json_schema: bool = False
    images: bool = False
    files: bool = False
    audio: bool = False
    video: bool = False
    logprobs: bool = False
    penalties: bool = False
    reasoning: bool = False
    list_ignored: Callable[[CreateRequest, str], Sequence[str]] | None = None


_ABLE: dict[str, Any] = {
    field.name: True
    for field in msgspec.structs.fields(Capabilities)
    if field.default is False and field.name not in ("any_model", "verify_json_schema")
}
ALL_CAPABILITIES = Capabilities(tools=frozenset({"function"}), **_ABLE)

_HINTS = (
    "client_metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)


def list_hint_parameters(request: CreateRequest) -> list[str]:
    """Those parameters of a request that a model can answer without, for `Capabilities.list_ignored`."""
    hints = [name for name in _HINTS if getattr(request, name) not in (None, {})]
    if request.service_tier in ("auto", "default"):  # which asks for nothing
        hints.remove("service_tier")
    if request.text is not None and request.text.verbosity is not None:
        hints.append("text.verbosity")
    return hints


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model a backend serves.

    `temperature` and `top_p` are what it is asked with when a request says nothing; without them, it decides itself.
    """

    id: str
    created: int
    owned_by: str
    context_window: int | None = None
    temperature: float | None = None
    top_p: float | None = None


class Backend(Protocol):
    """An upstream that answers turns.

    `stream` is awaited first and iterated after: what can be refused (an over-long context, a rejected request) is
    raised by the await, while the client can still get a plain HTTP error, or another backend can step in. So one that
    asks another server returns when the first words are there. Each batch holds what arrived at once, so that it leaves
    as one write. Closing the generator stops the model, promptly. The last delta of the last batch is
    `Finish` or `Failure`; a raised error is a failure too.
    """

    capabilities: Capabilities

    async def start(self) -> None:
        """Get ready (load weights, open a connection pool). Called once, before any turn."""

    async def close(self) -> None:
        """Release everything. Called once, after the last turn."""

    def models(self) -> Sequence[Model]:
        """The models this backend is known to answer for, now."""

    async def stream(self, turn: Turn) -> Deltas:
        """Begin the turn, then yield its deltas."""

    async def count_tokens(self, turn: Turn) -> int:
        """How many tokens the model would read for this turn."""


Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(options: Mapping[str, Any], kind: type[Options], *, name: str) -> Options:
    """The options of the backend `name`, or an error like `backends.local.threads: Expected int, got str`."""
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
    """The same error with the whole path of the wrong setting in front."""
    fault = validation.parse_error(error)
    dot = "." if fault.path and not fault.path.startswith("[") else ""
    return ConfigError(f"{where}{dot}{fault.path}: {fault.reason.replace('`', '')}")
