"""Models behind an API of the kind called Chat Completions: nearly every server there is."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.backends.base import Capabilities, Deltas, Turn, read_options
from antiphon.backends.chat_completions.options import Options, check_quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.backends.chat_completions.request import list_idle, make_body
from antiphon.backends.upstream.backend import UpstreamBackend
from antiphon.backends.upstream.naming import Naming
from antiphon.backends.upstream.usage import estimate_usage
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest

_REMEMBERED_MODELS = 256


class ChatCompletionsBackend(UpstreamBackend):
    """What a model cannot do, its server says: pictures, files and the like are passed on."""

    def __init__(self, name: str, options: Options) -> None:
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        super().__init__(name, options, headers=headers)
        self._options = options
        self._find_quirks = functools.lru_cache(_REMEMBERED_MODELS)(options.find_quirks)
        self.capabilities = Capabilities(
            tools=frozenset({"function"}),
            any_model=options.models is None,
            json_schema=options.find_quirks("").json_schema,
            images=True,
            files=True,
            audio=True,
            logprobs=True,
            penalties=True,
            reasoning=True,
            list_idle=self._list_idle,
        )

    def _list_idle(self, request: CreateRequest, model: str) -> list[str]:
        return list_idle(request, self._find_quirks(model))

    async def stream(self, turn: Turn) -> Deltas:
        model = turn.request.model or ""
        quirks = self._find_quirks(model)
        body = make_body(turn, quirks) | self._options.extra_body
        estimate = functools.partial(estimate_usage, turn)

        def make_reader() -> ChatReader:
            naming = Naming(self.upstream.name, model)
            return ChatReader(quirks, estimate=estimate, secrets=self.upstream.secrets, naming=naming)

        return await self.upstream.stream("/chat/completions", codec.encode(body), make_reader)


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ChatCompletionsBackend:
    """What the registry calls."""
    chosen = read_options(options, Options, name=name)
    check_quirks(chosen, name=name)
    return ChatCompletionsBackend(name, chosen)
