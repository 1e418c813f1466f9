"""Foreground responses in progress: those of this process, and those of others that serve the same clients.

A foreground response is in the store once it has ended. Until then, one process has it: this one, another worker of
the server, or another node.
"""

import asyncio
import math
from collections.abc import Sequence

import msgspec

from antiphon import offload
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.respond.run import Run
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.engine.serve.routing import Serving
from antiphon.errors import NotFound, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, Order, RunKey, Store
from antiphon.store.item_offsets import make_unknown_item_error
from antiphon.store.peer_link import PeerLink, PeersUnresponsive

_CANCEL, _RETRIEVE, _INPUT = "cancel", "retrieve", "input_page"
# Other ids are not sent to all processes, because none has such a response.
_ID_PREFIX = "resp_"
_MAX_ID_LENGTH = 200
# Maximum of `Retry-After` while a process does not answer.
_MAX_RETRY_SECONDS = 30


class _InputPage(msgspec.Struct, array_like=True):
    """A page of input items. Only its items are sent to another process, not the whole input."""

    after: str | None
    limit: int
    order: Order


class ForegroundResponses:
    """The foreground responses of this process, and questions to other processes about theirs.

    They are saved in `store` when they end. A process that has not answered for `lease` seconds is regarded as dead.
    Its responses are unknown then.
    """

    def __init__(self, store: Store, *, lease: float) -> None:
        self._store = store
        self._lease = lease
        self._runs: dict[RunKey, Run] = {}
        self._starting: set[asyncio.Task[object]] = set()
        self._links: list[PeerLink] = []
        self.is_stopping = False

    @property
    def count(self) -> int:
        """The number of responses of this process, including those whose model has not begun to answer."""
        return len(self._runs) + len(self._starting)

    def connect(self, link: PeerLink) -> None:
        """Ask the processes of this link for their responses, and answer their questions."""
        link.answers[_CANCEL] = self._answer_cancel
        link.answers[_RETRIEVE] = self._answer_retrieve
        link.answers[_INPUT] = self._answer_input
        self._links.append(link)

    def check_accepting(self) -> None:
        """Raise Unavailable if the server is shutting down."""
        if self.is_stopping:
            raise Unavailable("The server is shutting down.")

    async def serve(self, pipeline: Pipeline, prepared: Prepared, *, first_delta_seconds: float | None) -> Serving:
        """Start the model call of a request. Until the response is added, `stop` cancels the call."""
        self.check_accepting()
        task = asyncio.current_task()
        assert task is not None
        self._starting.add(task)
        try:
            return await pipeline.serve(prepared, first_delta_seconds=first_delta_seconds)
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            task.uncancel()
            raise Unavailable("The server is shutting down.") from None
        finally:
            self._starting.discard(task)

    def add(self, project: str, run: Run) -> None:
        """Add a response that begins. It is removed when it ends."""
        key = RunKey(project, run.response.id)
        self._runs[key] = run
        run.on_end(lambda: self._runs.pop(key, None))

    def stop(self) -> None:
        """Refuse new responses, and end those in progress with a terminal event."""
        self.is_stopping = True
        for run in tuple(self._runs.values()):
            run.stop()
        for task in self._starting:
            task.cancel()

    def _find_stored(self, project: str, response_id: str) -> Run | None:
        """Return a run of this process whose response will be stored."""
        run = self._runs.get(RunKey(project, response_id))
        return run if run is not None and run.begun.store else None

    async def find(self, project: str, response_id: str) -> Response:
        """Return a response that was not in the store. Raises NotFound if no process has it.

        Raises Unavailable if a process that may have it does not answer.
        """
        run = self._find_stored(project, response_id)
        response = run.begun if run is not None else None
        unanswered: Unavailable | None = None
        try:
            if response is None and (answer := await self._ask(_RETRIEVE, project, response_id)):
                response = await _decode(answer)
        except Unavailable as error:
            unanswered = error
        if response is None:  # it may have ended, and been stored, since the store was read
            response = await self._store.load_response(project, response_id)
        if response is None:
            raise unanswered or make_unknown_response_error(response_id)
        return response

    async def list_input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows:
        """Return a page of the input of a response that was not in the store. Raises as `find` does."""
        await self.find(project, response_id)
        page = _InputPage(after, limit, order)
        encoded = await self._encode_input(project, response_id, page)
        encoded = encoded or await self._ask(_INPUT, project, response_id, page) or b""
        if encoded:
            return await offload.run_sized(len(encoded), _decode_page, encoded, page)
        rows = await self._store.list_input_items(project, response_id, after=after, limit=limit, order=order)
        if rows is None:
            raise make_unknown_response_error(response_id)
        return rows

    async def delete(self, project: str, response_id: str) -> None:
        """Cancel and delete a response that was not in the store. Raises as `find` does."""
        await self.find(project, response_id)
        if await self.cancel(project, response_id) is None:
            await self.cancel_elsewhere(project, response_id)
        if not await self._store.delete(project, response_id):  # it is stored when it is cancelled
            raise make_unknown_response_error(response_id)

    async def cancel(self, project: str, response_id: str) -> Response | None:
        """Cancel a response of this process, and return it. None if there is no such response."""
        run = self._runs.get(RunKey(project, response_id))
        if run is None:
            return None
        await run.cancel_and_wait()
        return run.response

    async def cancel_elsewhere(self, project: str, response_id: str) -> Response | None:
        """Cancel a response of another process, and return it. Raises Unavailable if the process does not answer."""
        answer = await self._ask(_CANCEL, project, response_id)
        return await _decode(answer) if answer else None

    async def _ask(self, kind: str, project: str, response_id: str, *details: _InputPage) -> bytes | None:
        """Return the answer of the process that has a response, or None."""
        if len(response_id) > _MAX_ID_LENGTH or not response_id.startswith(_ID_PREFIX):
            return None
        question = msgspec.json.encode((project, response_id, *details))
        silent_seconds = self._lease
        for link in self._links:
            try:
                answers = await link.ask(kind, question)
            except PeersUnresponsive as error:
                silent_seconds = min(error.seconds, silent_seconds)
                continue
            if answers:
                return answers[0]
        if silent_seconds < self._lease:
            raise Unavailable(
                f"Response with id '{response_id}' is not stored. A node that does not answer may have it in progress.",
                param="response_id",
                code="node_unresponsive",
                retry_after=min(math.ceil(self._lease - silent_seconds), _MAX_RETRY_SECONDS),
            )
        return None

    async def _answer_cancel(self, payload: bytes) -> bytes:
        return await _encode(await self.cancel(*_decode_key(payload)))

    async def _answer_retrieve(self, payload: bytes) -> bytes:
        run = self._find_stored(*_decode_key(payload))
        return await _encode(None if run is None else run.begun)

    async def _answer_input(self, payload: bytes) -> bytes:
        return await self._encode_input(*msgspec.json.decode(payload, type=tuple[str, str, _InputPage]))

    async def _encode_input(self, project: str, response_id: str, page: _InputPage) -> bytes:
        """Return a page of the input of a response of this process; nothing if there is no such response."""
        run = self._find_stored(project, response_id)
        return b"" if run is None else await offload.run_in_thread(_encode_page, run.input_items, page)


def make_unknown_response_error(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", param="response_id")


def _encode_page(items: Sequence[Item | Unknown], page: _InputPage) -> bytes:
    """Return the items of a page and whether more follow, as JSON; null if there is no item to start after."""
    ordered = items if page.order == "asc" else items[::-1]
    start = 0
    if page.after is not None:
        start = 1 + next((index for index, item in enumerate(ordered) if item.id == page.after), -1)
        if not start:
            return b"null"
    end = start + page.limit
    return codec.encode((ordered[start:end], end < len(ordered)))


def _decode_page(encoded: bytes, page: _InputPage) -> ItemRows:
    decoded = msgspec.json.decode(encoded, type=tuple[msgspec.Raw, bool] | None)
    if decoded is None:
        raise make_unknown_item_error(page.after or "")
    items, has_more = decoded
    return ItemRows(items=codec.decode_items_lossless(bytes(items)), has_more=has_more)


def _decode_key(payload: bytes) -> tuple[str, str]:
    return msgspec.json.decode(payload, type=tuple[str, str])


async def _decode(answer: bytes) -> Response:
    return await offload.run_sized(len(answer), codec.decode_response, answer)


async def _encode(response: Response | None) -> bytes:
    return b"" if response is None else await offload.run_in_thread(codec.encode, response)
