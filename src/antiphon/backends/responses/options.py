"""What can be set for a server that speaks Responses."""

from typing import Literal

from antiphon.backends.upstream.options import UpstreamOptions


class Options(UpstreamOptions, kw_only=True):
    """`state` says who keeps what was said: this server, which then sends the whole context with every turn, or the
    upstream, which is then sent what is new. `session_headers` tells the upstream which turns belong together.
    `reasoning_text` sends a model's raw reasoning back to it, which some open models want and OpenAI's refuse.
    """

    state: Literal["local", "upstream"] = "local"
    session_headers: bool = True
    reasoning_text: bool = False
