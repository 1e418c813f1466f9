"""What a route says of itself in the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from antiphon.errors import AntiphonError


class Operation(Struct, frozen=True, kw_only=True):
    """`body`, `query` and `answer` are the types that the handler itself decodes and encodes.

    One without an `answer` switches to a WebSocket. `streams` says that the answer may be a stream of events instead,
    and `events` what these are, by their names, if they are not those of a response. `errors` are those that do not
    follow from the route's form, as a missing key does, or a path that leads to nothing; `failure` is the body of those
    that the handler itself answers with, if it is not the usual one.
    """

    id: str
    summary: str
    answer: Any = None
    body: Any = None
    optional_body: bool = False
    query: type[Struct] | None = None
    streams: bool = False
    events: Mapping[str, Any] = {}
    failure: Any = None
    errors: tuple[type[AntiphonError], ...] = ()
