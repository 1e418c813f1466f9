"""The backend for servers with Anthropic's Messages API."""

import functools
import re
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon import offload
from antiphon.backends.anthropic_messages.reader import MessagesReader
from antiphon.backends.anthropic_messages.request import (
    COUNTED_FIELDS,
    MessagesRequest,
    list_ignored_params,
    translate_request,
)
from antiphon.backends.anthropic_messages.traits import ModelTraits, find_traits
from antiphon.backends.base import Capabilities, Turn, read_options
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas
from antiphon.upstream.fields import ServedModel
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.usage import estimate_usage

# API versions from this one on reject `temperature` and `top_p` for every model.
_NO_SAMPLING_SINCE = "2026-10-21"
_THINKING_REJECTED = re.compile(r"thinking.*\bblocks?\b|signature", re.IGNORECASE | re.DOTALL)
_CACHED_MODELS = 256


class AnthropicMessagesOptions(UpstreamOptions, kw_only=True):
    """The options of one backend.

    `auth` is the header that carries the key: some gateways expect a bearer token. `version` is the API version.
    `max_tokens` limits an answer if the request has no limit. `like` names the Claude model whose traits apply, for
    models with names of their own. Without `json_schema`, Antiphon enforces output schemas itself, for servers that
    cannot.
    """

    base_url: str = "https://api.anthropic.com/v1"
    auth: Literal["x-api-key", "bearer"] = "x-api-key"
    version: str = "2023-06-01"
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    like: str | None = None
    json_schema: bool = True


class AnthropicMessagesBackend(UpstreamBackend):
    """One upstream with all of its models, listed or not."""

    def __init__(self, name: str, options: AnthropicMessagesOptions) -> None:
        headers = _write_headers(options)
        super().__init__(name, options, headers=headers, owned_by="anthropic", models_path="/models?limit=1000")
        self._options = options
        self._find_traits = functools.lru_cache(_CACHED_MODELS)(self._compute_traits)
        self.capabilities = Capabilities(
            tools=frozenset({"function"}),
            any_model=options.models is None,
            json_schema=options.json_schema,
            images=True,
            files=True,
            file_ids=True,
            file_urls=True,
            reasoning=True,
            list_ignored=self._list_ignored_params,
        )

    async def stream(self, turn: Turn) -> Deltas:
        request = await offload.run(self._translate, turn)
        # Only a large input is estimated now: later it would block the event loop.
        input_tokens = await self.estimate_input(turn) if offload.is_large() else None
        try:
            return await self._send(request, turn, input_tokens)
        except InvalidRequest as error:
            # Newer models reject their earlier thinking if anything before it has changed.
            if not request.has_thinking or not _THINKING_REJECTED.search(error.message):
                raise
        request = await offload.run(functools.partial(self._translate, include_thinking=False), turn)
        return await self._send(request, turn, input_tokens)

    async def count_tokens(self, turn: Turn) -> int:
        return await self.count_upstream("/messages/count_tokens", turn, self._write_count_request)

    def _write_count_request(self, turn: Turn) -> bytes:
        body = self._translate(turn).body
        return msgspec.json.encode({name: body[name] for name in COUNTED_FIELDS if name in body})

    def _send(self, request: MessagesRequest, turn: Turn, input_tokens: int | None) -> Awaitable[Deltas]:
        estimate = functools.partial(estimate_usage, turn.request, turn.items, input_tokens=input_tokens)

        def make_reader() -> MessagesReader:
            return MessagesReader(
                request.tool_names,
                secrets=self.upstream.secrets,
                served_model=ServedModel(self.upstream.name, turn.request.model or ""),
                estimate=estimate,
                limits=turn.limits,
            )

        def write(*, stream: bool) -> tuple[bytes, None]:
            return msgspec.json.encode(request.body | {"stream": stream}), None

        return self.send(turn, "/messages", write, make_reader)

    def _translate(self, turn: Turn, *, include_thinking: bool = True) -> MessagesRequest:
        traits = self._find_traits(turn.request.model or "")
        return translate_request(
            turn, traits, default_max_tokens=self._options.max_tokens, include_thinking=include_thinking
        )

    def _list_ignored_params(self, request: CreateRequest, model: str) -> list[str]:
        return list_ignored_params(request, self._find_traits(model))

    def _compute_traits(self, model: str) -> ModelTraits:
        traits = find_traits(self._options.like or model)
        rejects_sampling = self._options.version >= _NO_SAMPLING_SINCE
        return msgspec.structs.replace(traits, takes_sampling=traits.takes_sampling and not rejects_sampling)


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> AnthropicMessagesBackend:
    """Create the backend from its configuration. The registry calls this."""
    return AnthropicMessagesBackend(name, read_options(options, AnthropicMessagesOptions, name=name))


def _write_headers(options: AnthropicMessagesOptions) -> dict[str, str]:
    headers = {"anthropic-version": options.version}
    if options.api_key is not None:
        is_bearer = options.auth == "bearer"
        headers |= {"Authorization": f"Bearer {options.api_key}"} if is_bearer else {"x-api-key": options.api_key}
    return headers
