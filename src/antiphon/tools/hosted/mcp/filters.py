"""The filters of an `mcp` tool: the tools that a model may call, and the calls that need an approval."""

from antiphon.protocol.hosted import McpToolInfo
from antiphon.protocol.tools import McpApprovalFilter, McpTool, McpToolFilter


def is_read_only(tool: McpToolInfo) -> bool:
    """Return True if the server declares that the tool changes nothing."""
    return _has_hint(tool, "read_only")


def is_repeatable(tool: McpToolInfo) -> bool:
    """Return True if a call can be repeated: it changes nothing, or repeating it changes nothing more."""
    return _has_hint(tool, "read_only") or _has_hint(tool, "idempotent")


def is_allowed(tool: McpToolInfo, request: McpTool) -> bool:
    """Return True if `allowed_tools` of a request includes the tool."""
    allowed = request.allowed_tools
    if allowed is None:
        return True
    return _matches(allowed, tool) if isinstance(allowed, McpToolFilter) else tool.name in allowed


def needs_approval(tool: McpToolInfo, request: McpTool) -> bool:
    """Return True if `require_approval` of a request requires an approval for calls of the tool.

    A tool that matches both filters, or neither of two, needs one.
    """
    rule = request.require_approval
    if not isinstance(rule, McpApprovalFilter):
        return rule != "never"
    always = rule.always is not None and _matches(rule.always, tool)
    never = rule.never is not None and _matches(rule.never, tool)
    if always or never:
        return always
    return rule.always is None or rule.never is not None


def _matches(rule: McpToolFilter, tool: McpToolInfo) -> bool:
    """Return True if a tool has all properties that a filter names. An empty filter matches every tool."""
    if rule.tool_names is not None and tool.name not in rule.tool_names:
        return False
    return rule.read_only is None or rule.read_only == is_read_only(tool)


def _has_hint(tool: McpToolInfo, name: str) -> bool:
    return isinstance(tool.annotations, dict) and tool.annotations.get(name) is True
