"""What all backends that ask another server have in common."""

from collections.abc import Mapping, Sequence

from antiphon.backends.base import Model, Turn
from antiphon.backends.upstream.client import Upstream
from antiphon.backends.upstream.estimate import estimate_tokens
from antiphon.backends.upstream.models import Catalogue
from antiphon.backends.upstream.options import UpstreamOptions


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
