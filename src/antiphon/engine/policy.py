"""How the engine treats state: the settings that change what a request means."""

from collections.abc import Mapping, Sequence

import msgspec

from antiphon.config import UnsupportedTools
from antiphon.store.limits import RunLimits


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """`inherit_tools`: a continuation that says nothing of tools has those of the response it continues.

    `retention_seconds`: how long a response or a conversation is kept; None keeps it until it is deleted.
    `background_slots`: how many background responses this process works on at once.
    `background_lease_seconds`: when a process on another machine dies, its background responses are taken over after
    this time; on this machine, in a second. What another process may rather serve is left to it for so long.
    `background_limits`: limits on background responses, shared by all processes that use the store.
    `first_delta_seconds`: how long a stream may be silent while its model has not begun; then it begins without it.
    `models`: the names that models have here, see `routing.Router`.
    `unsupported_tools`: what becomes of tools that nobody here can run; by default, web search is dropped and others
    are refused.
    `stateless`: every request stands alone, and nothing is kept. `id_prefix`: what the ids then begin with.
    """

    inherit_tools: bool = True
    retention_seconds: int | None = None
    background_slots: int = 64
    background_lease_seconds: float = 15.0
    background_limits: RunLimits = RunLimits()
    first_delta_seconds: float = 5.0
    models: Mapping[str, Sequence[str]] = {}
    unsupported_tools: UnsupportedTools = "default"
    stateless: bool = False
    id_prefix: str = ""
