"""What all backends that ask another server have in common."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.backends.upstream.client import Upstream
from antiphon.backends.upstream.estimate import estimate_tokens
from antiphon.backends.upstream.failure import REFUSED
from antiphon.backends.upstream.models import Catalogue
from antiphon.backends.upstream.options import UpstreamOptions
from antiphon.errors import AntiphonError, NotFound


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
        self.upstream = Upstream(name, options, headers=headers)
        self._catalogue = Catalogue(self.upstream, owned_by=owned_by or name, path=models_path)
        self._counts = True

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @capabilities.setter
    def capabilities(self, able: Capabilities) -> None:
        """What a kind says of itself. A window that was set counts for models that are not listed, too."""
        window = self.upstream.options.context_window
        self._capabilities = msgspec.structs.replace(able, context_window=window, schema_on_trust=able.json_schema)

    async def start(self) -> None:
        await self.upstream.start()
        await self._catalogue.start()

    async def close(self) -> None:
        await self._catalogue.close()
        await self.upstream.close()

    def models(self) -> Sequence[Model]:
        return self._catalogue.models()

    async def count_tokens(self, turn: Turn) -> int:
        return estimate_tokens(turn)

    async def count_upstream(self, path: str, turn: Turn, write: Callable[[Turn], bytes]) -> int:
        """As the upstream counts what `write` makes of the turn. A server that does not count is not asked twice."""
        if not self._counts:
            return estimate_tokens(turn)
        body = write(turn)
        try:
            return msgspec.json.decode(await self.upstream.post_json(path, body), type=_Count).input_tokens
        except AntiphonError as error:
            # Every other error passes, or the turn itself will meet with it.
            if error.code == REFUSED or type(error) is NotFound:
                self._counts = False
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._counts = False
        return estimate_tokens(turn)
