"""The backend for servers that speak Anthropic's Messages API."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon.backends.anthropic_messages.reader import MessagesReader
from antiphon.backends.anthropic_messages.request import COUNTED, Composition, compose, list_idle
from antiphon.backends.anthropic_messages.traits import Traits, find_traits
from antiphon.backends.base import Capabilities, Turn, read_options
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas
from antiphon.upstream.options import UpstreamOptions


class Options(UpstreamOptions, kw_only=True):
    """`auth` says where the key goes: some gateways want it as a bearer token.

    `version` is the API's: the newest one takes no temperature at all. `max_tokens` is how long an answer may get when
    the request does not say. `like` names the Claude model that those of this server behave like, where their own names
    do not tell. Without `json_schema`, answers are held to schemas here and not there, for servers that cannot.
    """

    base_url: str = "https://api.anthropic.com/v1"
    auth: Literal["x-api-key", "bearer"] = "x-api-key"
    version: str = "2023-06-01"
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    like: str | None = None
    json_schema: bool = True


# From this version on, the API refuses any temperature, whatever the model takes.
_NO_SAMPLING_SINCE = "2026-10-21"
_BAD_THOUGHT = re.compile(r"thinking.*\bblocks?\b|signature", re.IGNORECASE | re.DOTALL)


class AnthropicMessagesBackend(UpstreamBackend):
    """One upstream with all of its models: those it lists, and those it has beside them."""

    def __init__(self, name: str, options: Options) -> None:
        headers = _write_headers(options)
        super().__init__(name, options, headers=headers, owned_by="anthropic", models_path="/models?limit=1000")
        self._options = options
        self.capabilities = Capabilities(
            tools=frozenset({"function"}),
            any_model=options.models is None,
            json_schema=options.json_schema,
            images=True,
            files=True,
            reasoning=True,
            list_idle=self._list_idle,
        )

    async def stream(self, turn: Turn) -> Deltas:
        composition = self._compose(turn)
        try:
            return await self._ask(composition)
        except InvalidRequest as error:
            # Newer models take their thinking back only while nothing before it has changed.
            if not composition.has_thoughts or not _BAD_THOUGHT.search(error.message):
                raise
        return await self._ask(self._compose(turn, thoughts=False))

    async def count_tokens(self, turn: Turn) -> int:
        return await self.count_upstream("/messages/count_tokens", turn, self._write_count)

    def _write_count(self, turn: Turn) -> bytes:
        body = self._compose(turn).body
        return msgspec.json.encode({name: body[name] for name in COUNTED if name in body})

    async def _ask(self, composition: Composition) -> Deltas:
        def make_reader() -> MessagesReader:
            return MessagesReader(composition.names, secrets=self.upstream.secrets)

        return await self.upstream.stream("/messages", msgspec.json.encode(composition.body), make_reader)

    def _compose(self, turn: Turn, *, thoughts: bool = True) -> Composition:
        traits = self._find_traits(turn.request.model or "")
        return compose(turn, traits, answer=self._options.max_tokens, thoughts=thoughts)

    def _list_idle(self, request: CreateRequest, model: str) -> list[str]:
        return list_idle(request, self._find_traits(model))

    def _find_traits(self, model: str) -> Traits:
        traits = find_traits(self._options.like or model)
        refuses = self._options.version >= _NO_SAMPLING_SINCE
        return msgspec.structs.replace(traits, sampling=traits.sampling and not refuses)


def _write_headers(options: Options) -> dict[str, str]:
    headers = {"anthropic-version": options.version}
    if options.api_key is not None:
        bearer = options.auth == "bearer"
        headers |= {"Authorization": f"Bearer {options.api_key}"} if bearer else {"x-api-key": options.api_key}
    return headers


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> AnthropicMessagesBackend:
    """What the registry calls."""
    return AnthropicMessagesBackend(name, read_options(options, Options, name=name))
