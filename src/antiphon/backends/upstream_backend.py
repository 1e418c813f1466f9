"""The base of backends that call another server: model list and token counts."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from antiphon import offload
from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.errors import AntiphonError, NotFound
from antiphon.protocol.items import Message
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

REFRESH_SECONDS = 60.0
START_SECONDS = 10.0

_MAX_UNCOUNTED_MODELS = 256

logger = logging.getLogger(__name__)

# Fields for the context size: vLLM and SGLang, OpenRouter and Together, Groq, LM Studio, Mistral, Anthropic, Gemini.
_WINDOWS = (
    "max_model_len",
    "context_length",
    "context_window",
    "loaded_context_length",
    "max_context_length",
    "max_input_tokens",
    "inputTokenLimit",
)
# llama.cpp: the configured size, then the size from training.
_META_WINDOWS = ("n_ctx", "n_ctx_train")


class ModelCatalog:
    """The upstream's model list, loaded at the start and refreshed regularly. A failed refresh keeps the old list."""

    def __init__(
        self,
        upstream: UpstreamClient,
        *,
        owned_by: str,
        path: str = "/models",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
        self._owned_by = owned_by
        self._path = path
        self._now = now
        self._loaded_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        named = upstream.options.models
        self._is_fixed = named is not None
        self._models: Sequence[Model] = tuple(self._make(name, {}) for name in dict.fromkeys(named or ()))

    async def start(self) -> None:
        """Load the list. After a short wait the server starts without it."""
        if not self._is_fixed:
            self._begin_refresh()
            assert self._refreshing is not None
            await asyncio.wait({self._refreshing}, timeout=START_SECONDS)

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def models(self) -> Sequence[Model]:
        """Return the current list, and refresh it in the background if it is old."""
        if not self._is_fixed and self._refreshing is None and self._now() - self._loaded_at >= REFRESH_SECONDS:
            self._begin_refresh()
        return self._models

    def _begin_refresh(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # called outside of an event loop, before the start
        self._loaded_at = self._now()
        self._refreshing = loop.create_task(self.refresh(), name=f"models of {self._upstream.name}")

    async def refresh(self) -> None:
        """Load the list now. Keep the old one if that fails."""
        try:
            self._models = await self.fetch()
        except AntiphonError as error:
            logger.warning("backend %s: cannot list models: %s", self._upstream.name, error.message)
        finally:
            self._refreshing = None

    async def fetch(self) -> Sequence[Model]:
        """Return the list of the upstream, also if the settings name the models. Raises AntiphonError."""
        return self._parse(await self._upstream.get_json(self._path))

    def _parse(self, payload: Any) -> Sequence[Model]:
        models: dict[str, Model] = {}
        for entry in _find_entries(payload):
            name = entry.get("id") or entry.get("name") or entry.get("model")
            if isinstance(name, str) and name:
                models.setdefault(name, self._make(name, entry))
        return tuple(models.values())

    def _make(self, name: str, entry: Mapping[str, Any]) -> Model:
        owner = entry.get("owned_by")
        return Model(
            id=name,
            created=_parse_time(entry.get("created") or entry.get("created_at") or entry.get("modified_at")),
            owned_by=owner if isinstance(owner, str) and owner else self._owned_by,
            context_window=self._upstream.options.context_window or _parse_window(entry),
        )


def _find_entries(payload: Any) -> list[Mapping[str, Any]]:
    """Return the entries of a model list: `data` for most servers, `models` for Ollama's own API and Gemini."""
    if isinstance(payload, Mapping):
        payload = payload.get("data") or payload.get("models")
    return [entry for entry in payload if isinstance(entry, Mapping)] if isinstance(payload, list) else []


def _parse_window(entry: Mapping[str, Any]) -> int | None:
    meta = entry.get("meta")
    sizes = [entry.get(name) for name in _WINDOWS]
    if isinstance(meta, Mapping):
        sizes += [meta.get(name) for name in _META_WINDOWS]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _parse_time(value: Any) -> int:
    if isinstance(value, int | float):
        return int(value)
    try:
        return int(datetime.fromisoformat(value).timestamp())
    except (TypeError, ValueError):
        return 0


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
        """Request the models of the upstream now, to find out if it can be reached. Raises AntiphonError."""
        return await self._catalog.fetch()

    async def send(self, turn: Turn, path: str, write: WriteRequest, make_reader: Callable[[], Reader]) -> Deltas:
        """Send the request of a turn, and return the deltas of its answer.

        Raises InvalidRequest if the turn has a URL that the upstream may not fetch.
        """
        if offload.is_large():
            await offload.run(check_media_urls, turn.items, turn.outbound)
            write = await _write_off_loop(write, is_stream=turn.streamed)
        elif has_media(turn.items):
            check_media_urls(turn.items, turn.outbound)
        if not turn.streamed:
            return await self.upstream.request_whole(
                path, write, make_reader, project=turn.project, background=turn.background, limits=turn.limits
            )
        body, headers = write(stream=True)
        return await self.upstream.stream(
            path,
            body,
            make_reader,
            headers=headers,
            on_accepted=turn.on_accepted,
            project=turn.project,
            background=turn.background,
            limits=turn.limits,
        )

    async def count_tokens(self, turn: Turn) -> int:
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
                    if len(self._uncounted_models) > _MAX_UNCOUNTED_MODELS:
                        del self._uncounted_models[next(iter(self._uncounted_models))]
            except AntiphonError:
                pass  # transient, or the turn itself raises it
        return await offload.run(estimate_tokens, turn.request, turn.items)

    async def _request_count(self, path: str, turn: Turn, write: Callable[[Turn], bytes]) -> int:
        body = await offload.run(write, turn)
        try:
            answer = await self.upstream.post_json(path, body, project=turn.project, background=turn.background)
            return msgspec.json.decode(answer, type=_Count).input_tokens
        except (msgspec.DecodeError, UnicodeDecodeError):
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
