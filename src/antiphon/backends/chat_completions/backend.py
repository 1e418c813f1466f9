"""The backend for servers with a Chat Completions API."""

import functools
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

from antiphon import offload
from antiphon.backends.base import Capabilities, Turn, locate_config_error, read_options
from antiphon.backends.chat_completions.quirks import Quirks, Server, find_quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.backends.chat_completions.request import list_ignored_params, make_body
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas
from antiphon.upstream.fields import ServedModel
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.usage import estimate_usage


class ChatCompletionsOptions(UpstreamOptions, kw_only=True):
    """The options of a Chat Completions upstream.

    `server` names the server program or service, if its address does not identify it. `quirks` override the built-in
    quirks for all models, and `model_quirks` by patterns of model names. The fields of `extra_body` override those of
    every request body.
    """

    server: Server | None = None
    quirks: dict[str, Any] = field(default_factory=dict)
    model_quirks: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)

    def find_quirks(self, model: str) -> Quirks:
        return find_quirks(
            model, self.base_url, server=self.server, changes=self.quirks, model_changes=self.model_quirks
        )


def check_quirks(options: ChatCompletionsOptions, *, name: str) -> None:
    """Raise `ConfigError` for unknown or invalid quirks. `name` is the backend's configured name."""
    prefix = f"backends.{name}"
    tables = {f"{prefix}.quirks": options.quirks}
    tables |= {f"{prefix}.model_quirks.{pattern!r}": table for pattern, table in options.model_quirks.items()}
    for path, table in tables.items():
        try:
            msgspec.convert(table, Quirks)
        except msgspec.ValidationError as error:
            raise locate_config_error(error, path) from None


_CACHED_MODELS = 256


class ChatCompletionsBackend(UpstreamBackend):
    """A Chat Completions backend. Images, files and audio are forwarded: the server rejects unsupported ones."""

    def __init__(self, name: str, options: ChatCompletionsOptions) -> None:
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        super().__init__(name, options, headers=headers)
        self._options = options
        self._find_quirks = functools.lru_cache(_CACHED_MODELS)(options.find_quirks)
        self.capabilities = Capabilities(
            tools=frozenset({"function"}),
            any_model=options.models is None,
            json_schema=options.find_quirks("").json_schema,
            images=True,
            files=True,
            file_ids=True,
            audio=True,
            logprobs=True,
            penalties=True,
            reasoning=True,
            list_ignored=self._list_ignored_params,
        )

    def _list_ignored_params(self, request: CreateRequest, model: str) -> list[str]:
        return list_ignored_params(request, self._find_quirks(model))

    def stream(self, turn: Turn) -> Awaitable[Deltas]:
        return self._stream_large(turn) if offload.is_large() else self._stream(turn)

    async def _stream_large(self, turn: Turn) -> Deltas:
        return await self._stream(turn, await self.estimate_input(turn))

    def _stream(self, turn: Turn, input_tokens: int | None = None) -> Awaitable[Deltas]:
        """Start the turn. `input_tokens` is an estimate, if there is one already."""
        model, extra_body = turn.request.model or "", self._options.extra_body
        quirks = self._find_quirks(model)
        if quirks.always_stream:
            turn = msgspec.structs.replace(turn, streamed=True)
        estimate = functools.partial(estimate_usage, turn.request, turn.items, input_tokens=input_tokens)

        def make_reader() -> ChatReader:
            served_model = ServedModel(self.upstream.name, model)
            return ChatReader(
                quirks,
                estimate=estimate,
                secrets=self.upstream.secrets,
                served_model=served_model,
                limits=turn.limits,
                is_whole=not turn.streamed,
                tools=turn.request.tools,
            )

        def write(*, stream: bool) -> tuple[bytes, None]:
            body = make_body(turn, quirks, stream=stream)
            return codec.encode(body | extra_body if extra_body else body), None

        return self.send(turn, "/chat/completions", write, make_reader)


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ChatCompletionsBackend:
    """Create the backend. The registry calls this."""
    parsed = read_options(options, ChatCompletionsOptions, name=name)
    check_quirks(parsed, name=name)
    return ChatCompletionsBackend(name, parsed)
