"""What can be set for a backend of this kind."""

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.backends.upstream.options import UpstreamOptions


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
