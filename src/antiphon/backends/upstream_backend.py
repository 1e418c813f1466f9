"""What all backends that ask another server have in common."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.errors import AntiphonError, NotFound
from antiphon.upstream.client import UpstreamClient
from antiphon.upstream.error_mapping import REFUSED
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.token_estimate import estimate_tokens

REFRESH_SECONDS = 60.0
START_SECONDS = 10.0

logger = logging.getLogger(__name__)

# Where servers say how much a model reads: vLLM and SGLang, OpenRouter and Together, Groq, LM Studio, Mistral,
# Anthropic, Gemini.
_WINDOWS = (
    "max_model_len",
    "context_length",
    "context_window",
    "loaded_context_length",
    "max_context_length",
    "max_input_tokens",
    "inputTokenLimit",
)
# llama.cpp: what it was started with, then what the model was trained with.
_META_WINDOWS = ("n_ctx", "n_ctx_train")


class ModelCatalog:
    """The list, asked for at the start and again now and then. As long as the server is down, what was known stays."""

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
        self._asked_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        named = upstream.options.models
        self._fixed = named is not None
        self._models: Sequence[Model] = tuple(self._make(name, {}) for name in dict.fromkeys(named or ()))

    async def start(self) -> None:
        """Ask for the list, and wait for it, but not for long: the server goes on without it."""
        if not self._fixed:
            self._begin_refresh()
            assert self._refreshing is not None
            await asyncio.wait({self._refreshing}, timeout=START_SECONDS)

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def models(self) -> Sequence[Model]:
        """The list as it is known now; if that is old, it is asked for again in the background."""
        if not self._fixed and self._refreshing is None and self._now() - self._asked_at >= REFRESH_SECONDS:
            self._begin_refresh()
        return self._models

    def _begin_refresh(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # asked outside of any loop, before the start
        self._asked_at = self._now()
        self._refreshing = loop.create_task(self.refresh(), name=f"models of {self._upstream.name}")

    async def refresh(self) -> None:
        """Ask now. If that fails, what was known stays."""
        try:
            payload = await self._upstream.get_json(self._path)
            self._models = self._read(payload)
        except AntiphonError as error:
            logger.warning("backend %s: its models could not be listed: %s", self._upstream.name, error.message)
        finally:
            self._refreshing = None

    def _read(self, payload: Any) -> Sequence[Model]:
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
            created=_read_time(entry.get("created") or entry.get("created_at") or entry.get("modified_at")),
            owned_by=owner if isinstance(owner, str) and owner else self._owned_by,
            context_window=self._upstream.options.context_window or _read_window(entry),
        )


def _find_entries(payload: Any) -> list[Mapping[str, Any]]:
    """The list within an answer: OpenAI and most others call it data, Ollama's own API and Gemini models."""
    if isinstance(payload, Mapping):
        payload = payload.get("data") or payload.get("models")
    return [entry for entry in payload if isinstance(entry, Mapping)] if isinstance(payload, list) else []


def _read_window(entry: Mapping[str, Any]) -> int | None:
    meta = entry.get("meta")
    sizes = [entry.get(name) for name in _WINDOWS]
    if isinstance(meta, Mapping):
        sizes += [meta.get(name) for name in _META_WINDOWS]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _read_time(value: Any) -> int:
    if isinstance(value, int | float):
        return int(value)
    try:
        return int(datetime.fromisoformat(value).timestamp())
    except (TypeError, ValueError):
        return 0


class _Count(msgspec.Struct):
    input_tokens: int


class UpstreamBackend:
    """All of a backend but its `capabilities` and its `stream`, which a kind adds. `upstream` is the way there."""

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
        self._catalogue = ModelCatalog(self.upstream, owned_by=owned_by or name, path=models_path)
        self._counts = True

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @capabilities.setter
    def capabilities(self, able: Capabilities) -> None:
        """What a kind says of itself. A window that was set counts for models that are not listed, too."""
        window = self.upstream.options.context_window
        self._capabilities = msgspec.structs.replace(able, context_window=window, verify_json_schema=able.json_schema)

    async def start(self) -> None:
        await self.upstream.start()
        await self._catalogue.start()

    async def close(self) -> None:
        await self._catalogue.close()
        await self.upstream.close()

    def models(self) -> Sequence[Model]:
        return self._catalogue.models()

    async def count_tokens(self, turn: Turn) -> int:
        return estimate_tokens(turn.request, turn.items)

    async def count_upstream(self, path: str, turn: Turn, write: Callable[[Turn], bytes]) -> int:
        """As the upstream counts what `write` makes of the turn. A server that does not count is not asked twice."""
        if not self._counts:
            return estimate_tokens(turn.request, turn.items)
        body = write(turn)
        try:
            return msgspec.json.decode(await self.upstream.post_json(path, body), type=_Count).input_tokens
        except AntiphonError as error:
            # Every other error passes, or the turn itself will meet with it.
            if error.code == REFUSED or type(error) is NotFound:
                self._counts = False
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._counts = False
        return estimate_tokens(turn.request, turn.items)
