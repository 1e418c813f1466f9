"""Rules against a model that repeats a tool call: the second identical call gets a warning, the third is not run.

The agent loop applies them in `ToolCalls` (`tool_calls.py`), and the execute endpoint in `execute/execution.py`. Tools
that are `repeatable` are exempt.
"""

import msgspec

from antiphon.protocol.json_text import read_json
from antiphon.tools.base import ToolInvocation, ToolResult

WARN_AT = 2
STOP_AT = 3

WARNING = "This very call was made before. If the result does not help, do something else or answer with what you have."
STOPPED = "This call was not made again: it has been made twice already. Answer now, with what you have."

Signature = tuple[str, bytes]


def make_signature(call: ToolInvocation) -> Signature:
    """Return a key that is equal for identical calls: same tool, same arguments in any JSON notation."""
    try:
        arguments = msgspec.json.encode(read_json(call.arguments or "{}"), order="deterministic")
    except msgspec.DecodeError:
        arguments = call.arguments.encode()
    return call.name, arguments


def add_warning(result: ToolResult) -> ToolResult:
    """Return the result with the warning about a repeated call."""
    if isinstance(result.output, str):
        return msgspec.structs.replace(result, output=f"{result.output}\n\n{WARNING}")
    return msgspec.structs.replace(result, output=[*result.output, {"type": "input_text", "text": WARNING}])
