"""A turn for one backend, put to another: what that one lacks is left out where that may be, and told."""

import msgspec

from antiphon.backends.base import Capabilities, Turn
from antiphon.config import UnsupportedTools
from antiphon.engine.history import check_input
from antiphon.engine.parameters import check_capabilities
from antiphon.engine.toolset import select_tools
from antiphon.errors import InvalidRequest


class Unfit(Exception):
    """The backend cannot do what the turn asks for."""


def adapt(
    turn: Turn, capabilities: Capabilities, model: str, *, unsupported: UnsupportedTools
) -> tuple[Turn, list[str]]:
    """The turn as this backend can serve it, and what is to be known about that. Raises Unfit."""
    try:
        warnings = check_capabilities(turn.request, capabilities, model)
        check_input(turn.items, capabilities, model)
        tools, left_out = select_tools(
            turn.request, capabilities=capabilities, unsupported=unsupported, earlier=turn.items
        )
    except InvalidRequest as error:
        raise Unfit(error.message) from None
    if left_out:
        turn = msgspec.structs.replace(turn, request=msgspec.structs.replace(turn.request, tools=tools or None))
    return turn, [*warnings, *left_out]


def lacks_something(error: InvalidRequest) -> bool:
    """Whether a backend refuses a request for what it cannot do itself, rather than for what it is."""
    return (error.code or "").startswith("unsupported")
