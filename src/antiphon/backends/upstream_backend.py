"""The base of backends that call another server."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon import offload
from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.backends.model_catalog import ModelCatalog
from antiphon.bounds import remove_oldest
from antiphon.errors import AntiphonError, NotFound
from antiphon.protocol.items import Message
from antiphon.protocol.json_text import read_json
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas
from antiphon.turn_queue import TurnQueue
from antiphon.upstream.client import UpstreamClient, WriteRequest
from antiphon.upstream.delta_stream import Reader
from antiphon.upstream.error_mapping import REFUSED
from antiphon.upstream.media_urls import check_media_urls, has_media
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.token_estimate import estimate_tokens
from antiphon.upstream.usage import MAX_COUNT

_MAX_UNCOUNTED_MODELS = 256


class _Count(msgspec.Struct):
    input_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class _NoCount(Exception):
    """The upstream has no count for a turn."""


class UpstreamBackend:
    """A backend without `capabilities` and `stream`, which a subclass adds. `upstream` is the client to use."""

    def __init__(
        self,
        name: str,
        options: UpstreamOptions,
        *,
        headers: Mapping[str, str],
        owned_by: str | None = None,
        models_path: str = "/models",
    ) -> None:
        self.upstream = UpstreamClient(name, options, headers=headers)
        self._catalog = ModelCatalog(self.upstream, owned_by=owned_by or name, path=models_path)
        self._uncounted_models: dict[str, None] = {}  # a set in the order of insertion

    @property
    def queue(self) -> TurnQueue | None:
        """The queue of turns, if the number of concurrent ones is limited."""
        return self.upstream.queue

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @capabilities.setter
    def capabilities(self, supported: Capabilities) -> None:
        """Set the capabilities of the subclass. A configured context window also applies to unlisted models."""
        window = self.upstream.options.context_window
        self._capabilities = msgspec.structs.replace(
            supported, context_window=window, verify_json_schema=supported.json_schema
        )

    async def start(self) -> None:
        await self.upstream.start()
        await self._catalog.start()

    async def close(self) -> None:
        await self._catalog.close()
        await self.upstream.close()

    def models(self) -> Sequence[Model]:
        return self._catalog.models()

    async def fetch_models(self) -> Sequence[Model]:
        """Request the models of the upstream, to check that it can be reached. Raises AntiphonError."""
        return await self._catalog.fetch()

    def send(self, turn: Turn, path: str, write: WriteRequest, make_reader: Callable[[], Reader]) -> Awaitable[Deltas]:
        """Send the request of a turn, and return the deltas of its answer.

        Raises InvalidRequest if the turn has a URL that the upstream may not fetch.
        """
        if offload.is_large():
            return self._send_large(turn, path, write, make_reader)
        if turn.items is not turn.text_items and has_media(turn.items):
            check_media_urls(turn.items, turn.outbound)
        return self._send_checked(turn, path, write, make_reader)

    async def _send_large(
        self, turn: Turn, path: str, write: WriteRequest, make_reader: Callable[[], Reader]
    ) -> Deltas:
        await offload.run(check_media_urls, turn.items, turn.outbound)
        write = await _write_off_loop(write, is_stream=turn.streamed)
        return await self._send_checked(turn, path, write, make_reader)

    def _send_checked(
        self, turn: Turn, path: str, write: WriteRequest, make_reader: Callable[[], Reader]
    ) -> Awaitable[Deltas]:
        if not turn.streamed:
            return self.upstream.request_whole(
                path,
                write,
                make_reader,
                on_sent=turn.progress.mark_sent,
                project=turn.project,
                background=turn.background,
                limits=turn.limits,
            )
        body, headers = write(stream=True)
        return self.upstream.stream(
            path,
            body,
            make_reader,
            headers=headers,
            on_sent=turn.progress.mark_sent,
            on_accepted=turn.on_accepted,
            project=turn.project,
            background=turn.background,
            limits=turn.limits,
        )

    async def count_tokens(self, turn: Turn) -> int:
        return await self.estimate_input(turn)

    async def estimate_input(self, turn: Turn) -> int:
        """Estimate the input tokens of a turn, in a thread if the request is large."""
        return await offload.run(estimate_tokens, turn.request, turn.items)

    async def count_upstream(self, path: str, turn: Turn, write: Callable[[Turn], bytes]) -> int:
        """Return the upstream's count for the body from `write`, or else an estimate.

        The content of a turn can cause a refusal, for example a reference to a missing file. So a minimal turn is sent
        after a refusal. If that is refused, too, the upstream is not asked again for this model.
        """
        model = turn.request.model or ""
        if model not in self._uncounted_models:
            try:
                return await self._request_count(path, turn, write)
            except _NoCount:
                if await self._is_count_refused(path, turn, write):
                    self._uncounted_models[model] = None
                    remove_oldest(self._uncounted_models, _MAX_UNCOUNTED_MODELS)
            except AntiphonError:
                pass  # transient, or the turn itself raises it
        return await self.estimate_input(turn)

    async def _request_count(self, path: str, turn: Turn, write: Callable[[Turn], bytes]) -> int:
        body = await offload.run(write, turn)
        try:
            answer = await self.upstream.post_json(path, body, project=turn.project, background=turn.background)
            return read_json(answer, _Count).input_tokens
        except msgspec.DecodeError:
            raise _NoCount from None
        except AntiphonError as error:
            if error.code == REFUSED or type(error) is NotFound:
                raise _NoCount from None
            raise

    async def _is_count_refused(self, path: str, turn: Turn, write: Callable[[Turn], bytes]) -> bool:
        """Return True if the upstream does not even count a minimal turn."""
        minimal = Turn(
            request=CreateRequest(model=turn.request.model),
            items=[Message("user", "Hello")],
            project=turn.project,
            background=turn.background,
        )
        try:
            await self._request_count(path, minimal, write)
        except _NoCount:
            return True
        except AntiphonError:
            pass
        return False


async def _write_off_loop(write: WriteRequest, *, is_stream: bool) -> WriteRequest:
    """Write a request in a thread. Return a function that returns it; a request of the other kind is written then."""
    written = await offload.run_in_thread(functools.partial(write, stream=is_stream))

    def find_written(*, stream: bool) -> tuple[bytes, Mapping[str, str] | None]:
        return written if stream == is_stream else write(stream=stream)

    return find_written
