"""What a kind of upstream inherits."""

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.token_estimate import estimate_tokens
from support.upstream_server import json_of, serve


async def test_it_lists_the_models_of_the_upstream_and_estimates_tokens() -> None:
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


def test_a_window_that_was_set_is_among_what_it_says_of_itself() -> None:
    backend = UpstreamBackend("up", UpstreamOptions(base_url="http://127.0.0.1:1/v1", context_window=4_000), headers={})
    backend.capabilities = Capabilities(any_model=True)
    assert backend.capabilities == Capabilities(any_model=True, context_window=4_000)


def test_that_its_server_holds_to_schemas_is_taken_on_trust() -> None:
    backend = UpstreamBackend("up", UpstreamOptions(base_url="http://127.0.0.1:1/v1"), headers={})
    backend.capabilities = Capabilities(json_schema=True)
    assert backend.capabilities == Capabilities(json_schema=True, verify_json_schema=True)
