"""Antiphon: the whole Responses API on any model, in one process."""

from typing import TYPE_CHECKING, Any

from antiphon.errors import AntiphonError, ConfigError, InvalidRequest, ServerError

if TYPE_CHECKING:
    from antiphon.agent.approvals import Approval
    from antiphon.agent.content import FileInput, ImageInput, user_message
    from antiphon.agent.conversation_session import ConversationSession
    from antiphon.agent.guardrails import (
        Block,
        CallCheck,
        InputCheck,
        OutputCheck,
        ParallelGuardrail,
        Replace,
        ResultCheck,
    )
    from antiphon.agent.handoffs import Handoff, drop_tool_calls
    from antiphon.agent.limits import Limits, Prices
    from antiphon.agent.outcome import (
        AgentChanged,
        ArgumentsDelta,
        ModelEvent,
        Notice,
        Outcome,
        PartialOutput,
        ReasoningDelta,
        RunEnded,
        RunError,
        RunEvent,
        SubagentEvent,
        TextDelta,
        ToolFinished,
        ToolProgress,
        ToolStarted,
        TurnFinished,
        TurnRestarted,
        TurnStarted,
    )
    from antiphon.agent.run_records import RunRecord, delete_run, list_runs, prune_runs, read_run
    from antiphon.agent.run_stream import RunStream
    from antiphon.agent.tracing import instrument, uninstrument
    from antiphon.agent.transports.base import Transport
    from antiphon.agent.transports.engine import LocalTransport
    from antiphon.agent.transports.http import HttpTransport
    from antiphon.agent.transports.websocket import WebSocketTransport
    from antiphon.ledger import Ledger, RunSummary, RunTaken
    from antiphon.protocol.response import Usage
    from antiphon.runtime import Agent
    from antiphon.session import Session, SessionBusy, SessionFailed, last_turns
    from antiphon.store.ledger import MemoryLedger, SqliteLedger
    from antiphon.store.session import MemorySession, SqliteSession
    from antiphon.tools.base import (
        ModelRetry,
        PendingToolCall,
        RunContext,
        Tool,
        ToolContext,
        ToolInvocation,
        ToolResult,
        UsageCost,
    )
    from antiphon.tools.function import CallableTool, tool
    from antiphon.tools.mcp import McpServer
    from antiphon.tools.mcp_requests import McpElicitation, McpSampling
    from antiphon.tools.native import (
        CommandOutput,
        ComputerRequest,
        LocalShellRequest,
        PatchRequest,
        ShellRequest,
        apply_patch_tool,
        computer_tool,
        local_shell_tool,
        shell_tool,
    )
    from antiphon.tools.server_tools import CodeInterpreter, FileSearch, Mcp, ServerTool, WebSearch
    from antiphon.tools.toolset import Toolset

    __version__: str

__all__ = [
    "Agent",
    "AgentChanged",
    "AntiphonError",
    "Approval",
    "ArgumentsDelta",
    "Block",
    "CallCheck",
    "CallableTool",
    "CodeInterpreter",
    "CommandOutput",
    "ComputerRequest",
    "ConfigError",
    "ConversationSession",
    "FileInput",
    "FileSearch",
    "Handoff",
    "HttpTransport",
    "ImageInput",
    "InputCheck",
    "InvalidRequest",
    "Ledger",
    "Limits",
    "LocalShellRequest",
    "LocalTransport",
    "Mcp",
    "McpElicitation",
    "McpSampling",
    "McpServer",
    "MemoryLedger",
    "MemorySession",
    "ModelEvent",
    "ModelRetry",
    "Notice",
    "Outcome",
    "OutputCheck",
    "ParallelGuardrail",
    "PartialOutput",
    "PatchRequest",
    "PendingToolCall",
    "Prices",
    "ReasoningDelta",
    "Replace",
    "ResultCheck",
    "RunContext",
    "RunEnded",
    "RunError",
    "RunEvent",
    "RunRecord",
    "RunStream",
    "RunSummary",
    "RunTaken",
    "ServerError",
    "ServerTool",
    "Session",
    "SessionBusy",
    "SessionFailed",
    "ShellRequest",
    "SqliteLedger",
    "SqliteSession",
    "SubagentEvent",
    "TextDelta",
    "Tool",
    "ToolContext",
    "ToolFinished",
    "ToolInvocation",
    "ToolProgress",
    "ToolResult",
    "ToolStarted",
    "Toolset",
    "Transport",
    "TurnFinished",
    "TurnRestarted",
    "TurnStarted",
    "Usage",
    "UsageCost",
    "WebSearch",
    "WebSocketTransport",
    "__version__",
    "apply_patch_tool",
    "computer_tool",
    "delete_run",
    "drop_tool_calls",
    "instrument",
    "last_turns",
    "list_runs",
    "local_shell_tool",
    "prune_runs",
    "read_run",
    "shell_tool",
    "tool",
    "uninstrument",
    "user_message",
]

# The modules of the public names. They are imported at first use, because an agent takes longer to import.
_MODULES = {
    "Agent": "antiphon.runtime",
    "AgentChanged": "antiphon.agent.outcome",
    "Approval": "antiphon.agent.approvals",
    "ArgumentsDelta": "antiphon.agent.outcome",
    "Block": "antiphon.agent.guardrails",
    "CallCheck": "antiphon.agent.guardrails",
    "CallableTool": "antiphon.tools.function",
    "CodeInterpreter": "antiphon.tools.server_tools",
    "CommandOutput": "antiphon.tools.native",
    "ComputerRequest": "antiphon.tools.native",
    "ConversationSession": "antiphon.agent.conversation_session",
    "FileInput": "antiphon.agent.content",
    "FileSearch": "antiphon.tools.server_tools",
    "Handoff": "antiphon.agent.handoffs",
    "HttpTransport": "antiphon.agent.transports.http",
    "ImageInput": "antiphon.agent.content",
    "InputCheck": "antiphon.agent.guardrails",
    "Ledger": "antiphon.ledger",
    "Limits": "antiphon.agent.limits",
    "LocalShellRequest": "antiphon.tools.native",
    "LocalTransport": "antiphon.agent.transports.engine",
    "Mcp": "antiphon.tools.server_tools",
    "McpElicitation": "antiphon.tools.mcp_requests",
    "McpSampling": "antiphon.tools.mcp_requests",
    "McpServer": "antiphon.tools.mcp",
    "MemoryLedger": "antiphon.store.ledger",
    "MemorySession": "antiphon.store.session",
    "ModelEvent": "antiphon.agent.outcome",
    "ModelRetry": "antiphon.tools.base",
    "Notice": "antiphon.agent.outcome",
    "Outcome": "antiphon.agent.outcome",
    "OutputCheck": "antiphon.agent.guardrails",
    "ParallelGuardrail": "antiphon.agent.guardrails",
    "PartialOutput": "antiphon.agent.outcome",
    "PatchRequest": "antiphon.tools.native",
    "PendingToolCall": "antiphon.tools.base",
    "Prices": "antiphon.agent.limits",
    "ReasoningDelta": "antiphon.agent.outcome",
    "Replace": "antiphon.agent.guardrails",
    "ResultCheck": "antiphon.agent.guardrails",
    "RunContext": "antiphon.tools.base",
    "RunEnded": "antiphon.agent.outcome",
    "RunError": "antiphon.agent.outcome",
    "RunEvent": "antiphon.agent.outcome",
    "RunRecord": "antiphon.agent.run_records",
    "RunStream": "antiphon.agent.run_stream",
    "RunSummary": "antiphon.ledger",
    "RunTaken": "antiphon.ledger",
    "ServerTool": "antiphon.tools.server_tools",
    "Session": "antiphon.session",
    "SessionBusy": "antiphon.session",
    "SessionFailed": "antiphon.session",
    "ShellRequest": "antiphon.tools.native",
    "SqliteLedger": "antiphon.store.ledger",
    "SqliteSession": "antiphon.store.session",
    "SubagentEvent": "antiphon.agent.outcome",
    "TextDelta": "antiphon.agent.outcome",
    "Tool": "antiphon.tools.base",
    "ToolContext": "antiphon.tools.base",
    "ToolFinished": "antiphon.agent.outcome",
    "ToolInvocation": "antiphon.tools.base",
    "ToolProgress": "antiphon.agent.outcome",
    "ToolResult": "antiphon.tools.base",
    "ToolStarted": "antiphon.agent.outcome",
    "Toolset": "antiphon.tools.toolset",
    "Transport": "antiphon.agent.transports.base",
    "TurnFinished": "antiphon.agent.outcome",
    "TurnRestarted": "antiphon.agent.outcome",
    "TurnStarted": "antiphon.agent.outcome",
    "Usage": "antiphon.protocol.response",
    "UsageCost": "antiphon.tools.base",
    "WebSearch": "antiphon.tools.server_tools",
    "WebSocketTransport": "antiphon.agent.transports.websocket",
    "apply_patch_tool": "antiphon.tools.native",
    "computer_tool": "antiphon.tools.native",
    "delete_run": "antiphon.agent.run_records",
    "drop_tool_calls": "antiphon.agent.handoffs",
    "instrument": "antiphon.agent.tracing",
    "last_turns": "antiphon.session",
    "list_runs": "antiphon.agent.run_records",
    "local_shell_tool": "antiphon.tools.native",
    "prune_runs": "antiphon.agent.run_records",
    "read_run": "antiphon.agent.run_records",
    "shell_tool": "antiphon.tools.native",
    "tool": "antiphon.tools.function",
    "uninstrument": "antiphon.agent.tracing",
    "user_message": "antiphon.agent.content",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from antiphon.entry_points import find_own_version

        return find_own_version()
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'antiphon' has no attribute {name!r}")
