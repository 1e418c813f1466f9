"""The base of backends that call another server: models, token counts, capabilities."""

from collections.abc import Sequence

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.token_estimate import estimate_tokens
from support.upstream_server import json_of, serve


async def test_upstream_backend_lists_models_and_estimates_tokens() -> None:
    turn = Turn(request=CreateRequest(model="m"), items=[Message("user", "How many words are these?")])
    async with serve(fixed={"/v1/models": json_of({"data": [{"id": "m", "created": 7}]})}) as upstream:
        backend = UpstreamBackend("up", UpstreamOptions(base_url=upstream.url), headers={"X-Who": "me"})
        await backend.start()
        try:
            assert backend.models() == (Model(id="m", created=7, owned_by="up"),)
            assert await backend.count_tokens(turn) == estimate_tokens(turn.request, turn.items)
        finally:
            await backend.close()
        assert upstream.requests[0].headers["x-who"] == "me"


def test_subclass_lists_its_own_models() -> None:
    class FixedBackend(UpstreamBackend):
        def models(self) -> Sequence[Model]:
            return (*super().models(), Model(id="added", created=0, owned_by="up"))

    backend = FixedBackend("up", UpstreamOptions(base_url="http://127.0.0.1:1/v1", models=["m"]), headers={})
    assert [each.id for each in backend.models()] == ["m", "added"]


def test_configured_window_is_a_capability() -> None:
    backend = UpstreamBackend("up", UpstreamOptions(base_url="http://127.0.0.1:1/v1", context_window=4_000), headers={})
    backend.capabilities = Capabilities(any_model=True)
    assert backend.capabilities == Capabilities(any_model=True, context_window=4_000)


def test_upstream_json_schema_is_verified() -> None:
    backend = UpstreamBackend("up", UpstreamOptions(base_url="http://127.0.0.1:1/v1"), headers={})
    backend.capabilities = Capabilities(json_schema=True)
    assert backend.capabilities == Capabilities(json_schema=True, verify_json_schema=True)
