"""The list of the models that an upstream serves."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from antiphon.backends.base import Model
from antiphon.errors import AntiphonError
from antiphon.tasks import cancel_tasks
from antiphon.upstream.client import UpstreamClient

REFRESH_SECONDS = 60.0
START_SECONDS = 10.0

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
        await cancel_tasks(self._refreshing)

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
        """Return the list of the upstream, even if the settings name the models. Raises AntiphonError."""
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
