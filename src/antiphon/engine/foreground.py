"""Foreground responses in progress: those of this process, and those of others that serve the same clients.

A foreground response is in the store once it has ended. Until then, one process has it: this one, another worker of
the server, or another node.
"""

import asyncio
import math

import msgspec

from antiphon import offload
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.respond.run import Run
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.engine.serve.routing import Serving
from antiphon.errors import Unavailable
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.store.base import RunKey
from antiphon.store.peer_link import PeerLink, PeersUnresponsive

_CANCEL, _RETRIEVE = "cancel", "retrieve"
# Other ids are not sent to all processes, because none has such a response.
_ID_PREFIX = "resp_"
_MAX_ID_LENGTH = 200
# Maximum of `Retry-After` while a process does not answer.
_MAX_RETRY_SECONDS = 30


class ForegroundResponses:
    """The foreground responses of this process, and questions to other processes about theirs.

    A process that has not answered for `lease` seconds is regarded as dead. Its responses are unknown then.
    """

    def __init__(self, *, lease: float) -> None:
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
        """Refuse new responses, and end all in progress with a terminal event."""
        self.is_stopping = True
        for run in tuple(self._runs.values()):
            run.stop()
        for task in self._starting:
            task.cancel()

    def find(self, project: str, response_id: str) -> Response | None:
        """Return a response of this process that will be stored, as it began."""
        run = self._runs.get(RunKey(project, response_id))
        return run.begun if run is not None and run.begun.store else None

    async def find_elsewhere(self, project: str, response_id: str) -> Response | None:
        """Return a response that another process has begun. Raises Unavailable if that cannot be found out."""
        return await self._ask(_RETRIEVE, project, response_id)

    async def cancel(self, project: str, response_id: str) -> Response | None:
        """Cancel a response of this process, and return it. None if there is no such response."""
        run = self._runs.get(RunKey(project, response_id))
        if run is None:
            return None
        await run.cancel_and_wait()
        return run.response

    async def cancel_elsewhere(self, project: str, response_id: str) -> Response | None:
        """Cancel a response of another process, and return it. Raises Unavailable, as `find_elsewhere`."""
        return await self._ask(_CANCEL, project, response_id)

    async def _ask(self, kind: str, project: str, response_id: str) -> Response | None:
        if len(response_id) > _MAX_ID_LENGTH or not response_id.startswith(_ID_PREFIX):
            return None
        question = msgspec.json.encode((project, response_id))
        silent_seconds = self._lease
        for link in self._links:
            try:
                answers = await link.ask(kind, question)
            except PeersUnresponsive as error:
                silent_seconds = min(error.seconds, silent_seconds)
                continue
            if answers:
                return await offload.run_sized(len(answers[0]), codec.decode_response, answers[0])
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
        return await _encode(self.find(*_decode_key(payload)))


def _decode_key(payload: bytes) -> tuple[str, str]:
    return msgspec.json.decode(payload, type=tuple[str, str])


async def _encode(response: Response | None) -> bytes:
    return b"" if response is None else await offload.run_in_thread(codec.encode, response)
