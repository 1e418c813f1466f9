"""Antiphon: the whole Responses API on any model, in one process."""

from typing import TYPE_CHECKING, Any

from antiphon.errors import AntiphonError, ConfigError, InvalidRequest, ServerError

if TYPE_CHECKING:
    from antiphon.agent.limits import Limits, Prices
    from antiphon.agent.outcome import Outcome
    from antiphon.ledger import RunTaken
    from antiphon.runtime import Agent
    from antiphon.store.ledger import SqliteLedger
    from antiphon.tools.base import Tool, ToolContext, ToolResult
    from antiphon.tools.function import tool

    __version__: str

__all__ = [
    "Agent",
    "AntiphonError",
    "ConfigError",
    "InvalidRequest",
    "Limits",
    "Outcome",
    "Prices",
    "RunTaken",
    "ServerError",
    "SqliteLedger",
    "Tool",
    "ToolContext",
    "ToolResult",
    "__version__",
    "tool",
]

# The modules of the public names. They are imported at first use, because an agent takes longer to import.
_MODULES = {
    "Agent": "antiphon.runtime",
    "Limits": "antiphon.agent.limits",
    "Outcome": "antiphon.agent.outcome",
    "Prices": "antiphon.agent.limits",
    "RunTaken": "antiphon.ledger",
    "SqliteLedger": "antiphon.store.ledger",
    "Tool": "antiphon.tools.base",
    "ToolContext": "antiphon.tools.base",
    "ToolResult": "antiphon.tools.base",
    "tool": "antiphon.tools.function",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Reading the installed version takes longer than importing everything else here.
        from importlib.metadata import version

        return version("antiphon")
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'antiphon' has no attribute {name!r}")
