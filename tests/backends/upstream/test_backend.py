"""What a kind of upstream inherits."""

from antiphon.backends.base import Model, Turn
from antiphon.backends.upstream.backend import UpstreamBackend
from antiphon.backends.upstream.estimate import estimate_tokens
from antiphon.backends.upstream.options import UpstreamOptions
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest
from upstream_server import json_of, serve


async def test_it_lists_the_models_of_the_upstream_and_estimates_tokens() -> None:
    turn = Turn(request=CreateRequest(model="m"), items=[Message("user", "How many words are these?")])
    async with serve(fixed={"/v1/models": json_of({"data": [{"id": "m", "created": 7}]})}) as upstream:
        backend = UpstreamBackend("up", UpstreamOptions(base_url=upstream.url), headers={"X-Who": "me"})
        await backend.start()
        try:
            assert backend.models() == (Model(id="m", created=7, owned_by="up"),)
            assert await backend.count_tokens(turn) == estimate_tokens(turn)
        finally:
            await backend.close()
        assert upstream.requests[0].headers["x-who"] == "me"
