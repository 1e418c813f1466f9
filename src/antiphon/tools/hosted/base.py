"""The interface of hosted tools: tools that this server runs between the model calls of one response.

A `HostedTool` exists once per server. For each of its entries in the `tools` of a request it opens a `HostedSession`,
which names the functions that the model sees. When the model calls one of them, the session begins a `HostedCall`. The
call writes its output item and the events of the item as deltas, and the loop (`engine/serve/hosted`) passes them to
the client. The full item becomes part of the context of the next model call.

A package registers a tool in the entry point group `antiphon.hosted_tools`, see `registry.py`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from antiphon.config.settings import Settings
from antiphon.protocol.filters import Filter
from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Annotate, Delta, Text
from antiphon.tools.hosted.code_interpreter.service import ContainerService
from antiphon.upstream.addresses import OutboundRules


class FoundText(msgspec.Struct, frozen=True, kw_only=True):
    """A passage of a file that a search has found. `score` is from 0 to 1."""

    file_id: str
    filename: str
    text: str
    score: float
    attributes: JsonObject | None = None


class FileSearchService(Protocol):
    """The vector stores of the server."""

    async def check_store(self, project: str, store_id: str, *, param: str) -> None:
        """Raise NotFound or InvalidRequest with this param unless the project has a store that can be searched."""

    async def search(
        self,
        project: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        *,
        limit: int,
        condition: Filter | None = None,
        threshold: float = 0.0,
        weights: tuple[float, float] = (0.8, 0.2),
    ) -> list[FoundText]:
        """Return the best passages of the stores, best first. `weights` are those of vectors and of words."""


class StoredImageService(Protocol):
    """The images among the files of a project."""

    async def check_file(self, project: str, file_id: str, *, param: str) -> None:
        """Raise NotFound with this param unless the project has the file."""

    async def load_image(self, project: str, file_id: str, *, max_bytes: int) -> tuple[str, bytes]:
        """Return the media type and the content of an image.

        Raises NotFound if there is no such file, and InvalidRequest if it is too large or not an image.
        """


class HostedServices(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of the engine that tools use: one field per service, None if the engine does not have it.

    `claim` records an effect before it happens. It returns False if the same key of the project was claimed before, by
    any request or process, so that an effect with a key happens at most once. A claim lasts as long as responses are
    stored, and a year if they do not expire. `file_search` searches vector stores. `images` reads stored files.
    """

    claim: Callable[[str, str], Awaitable[bool]] | None = None
    file_search: FileSearchService | None = None
    containers: ContainerService | None = None
    images: StoredImageService | None = None


NO_SERVICES = HostedServices()


class HostedSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a tool's factory: the settings of the server."""

    settings: Settings


class HostedUnavailable(Exception):
    """Raised by a factory if its tool cannot run: it is not configured, or a package is missing.

    Requests with a tool of these types are handled by the setting `unsupported_tools`. A refusal contains the message.
    """

    def __init__(self, types: frozenset[str], message: str) -> None:
        super().__init__(message)
        self.types = types
        self.message = message


class HostedContext(msgspec.Struct, frozen=True, kw_only=True):
    """The response that a session belongs to."""

    project: str
    response_id: str
    request: CreateRequest
    items: Sequence[Item | Unknown]
    """The context of the first model call."""
    outbound: OutboundRules
    """The rules by which URLs of the request may be fetched."""
    warn: Callable[[str], None]
    """Adds a warning for the client. After the stream has begun it has no effect."""
    services: HostedServices = NO_SERVICES
    resumed: bool = False
    """True if an earlier attempt at this background response was interrupted."""
    has_begun: Callable[[], bool] = lambda: False
    """Returns True if the response has begun: the client can get no HTTP error any more."""
    can_defer: bool = False
    """The model can search for tools, so a session with `defer_loading` may find its functions later."""

    def find_index(self, tool: Tool | Unknown) -> int | None:
        """Return the index of a tool entry in the request."""
        return next((index for index, each in enumerate(self.request.tools or ()) if each is tool), None)

    def find_param(self, tool: Tool | Unknown) -> str:
        """Return the param path of a tool entry."""
        index = self.find_index(tool)
        return "tools" if index is None else f"tools[{index}]"


class HostedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function of a session, as the model sees it. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: JsonObject
    strict: bool = False


class HostedCall:
    """One call of a hosted function. Its item is opened with `OpenItem` and closed with `CloseItem`, under its key.

    `needs_client` is read after `run`. If it is true, the response ends after this round, because the client has to
    reply first. Such a call does not count as executed.
    """

    needs_client: bool = False

    @property
    def is_repeatable(self) -> bool:
        """True if running the call twice does no harm. Else a call is not run again after a crash."""
        return False

    def write(self, fragment: str) -> Sequence[Delta]:
        """Take more of the arguments and return the deltas that can be sent now. The first of them is `OpenItem`.

        Called before `run`, as the model writes. A tool that does not stream its arguments returns nothing.
        """
        return ()

    def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        """Execute the call and yield its deltas, up to `CloseItem` with the full item.

        Opens the item, unless `write` has. A failure of the tool is an item with the status `failed`. An error raised
        here ends the call by `fail`. Closing the generator stops the tool.
        """
        raise NotImplementedError

    def fail(self, message: str) -> Sequence[Delta]:
        """Return the deltas that end the call as failed with this message. Opens the item, unless it is open."""
        raise NotImplementedError


class OpeningCall(HostedCall):
    """A call that opens its item once: with the first deltas of `write`, `run` or `fail`."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._is_open = False

    def open(self) -> list[Delta]:
        """Return the deltas that open the item, or none if it is open."""
        if self._is_open:
            return []
        self._is_open = True
        return self.make_opening()

    def make_opening(self) -> list[Delta]:
        """Return `OpenItem`, and the events that follow it at once."""
        raise NotImplementedError


class ApprovedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the client has approved: it is run before the first model call. `name` is its function."""

    name: str
    arguments: str
    begin: Callable[[str], HostedCall]


class TextFilter:
    """Rewrites the text of one message as it streams, for example citation markers into annotations."""

    def feed(self, text: str) -> Sequence[Text | Annotate]:
        """Return the text that can be sent now, and annotations on it. Text may be held back."""
        raise NotImplementedError

    def close(self) -> Sequence[Text | Annotate]:
        """Return the rest at the end of the message."""
        return ()


class HostedSession:
    """One tool entry of a request during one response.

    `functions` are read before each model call. `label` becomes the prefix of a function's name if the name is taken.
    `instructions` are added to the request's for each model call. `pending` are run before the first model call, after
    `introduce`, in order.
    """

    functions: Sequence[HostedFunction] = ()
    label: str = "hosted"
    instructions: str = ""
    pending: Sequence[ApprovedCall] = ()

    async def introduce(self) -> AsyncGenerator[Sequence[Delta], None]:
        """Yield the items that come before the first model call. They must have no effects."""
        return
        yield

    @property
    def is_deferred(self) -> bool:
        """True if the functions are not known before `load`, which is called before the first tool search."""
        return False

    async def load(self) -> Sequence[Delta]:
        """Find the functions of a deferred session, and return the deltas of the items that list them."""
        return ()

    def observe(self, item: Item | Unknown) -> None:
        """Take note of an item of the context: of the history, or of a finished call of this response, in order."""

    def begin(self, name: str, key: str) -> HostedCall:
        """Begin a call of the function. `key` is the key of its item, unique within the response."""
        raise NotImplementedError

    def open_text(self) -> TextFilter | None:
        """Return a filter for the next message of the model, or None."""
        return None

    async def close(self) -> None:
        """Release the resources of the session. Called once, even after errors and cancellation."""


class HostedTool:
    """A hosted tool of this server. `types` are the tool types that it serves, including aliases."""

    types: frozenset[str]

    async def start(self) -> None:
        """Prepare the tool. Called once, before the first request."""

    async def close(self) -> None:
        """Release everything. Called once, after the last response."""

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        """Open a session for one tool entry. An entry of a type that the protocol does not know is `Unknown`.

        Raises InvalidRequest or UpstreamError before the response begins: the client gets an HTTP error.
        """
        raise NotImplementedError

    def echo(self, tool: Tool | Unknown) -> Tool | Unknown:
        """Return the tool as responses show and store it: without secrets, with defaults filled in."""
        return tool
