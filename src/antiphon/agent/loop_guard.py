"""Rules against a model that repeats a tool call: the second identical call gets a warning, the third is not run.

In the agent loop (`tool_calls.py`) a call is a repetition if it has the same arguments and the same result as before,
and if no other call has succeeded in between. Tools that are `repeatable` are exempt. The execute endpoint
(`execute/execution.py`) counts calls by their arguments alone.
"""

from hashlib import sha256

import msgspec

from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import ToolInvocation, ToolResult

WARN_AT = 2
STOP_AT = 3

WARNING = "This very call was made before. If the result does not help, do something else or answer with what you have."
STOPPED = "This call was not made again: it has been made twice already. Answer now, with what you have."

Signature = tuple[str, bytes]
Output = str | list[JsonObject]


def make_signature(call: ToolInvocation) -> Signature:
    """Return a key that is equal for identical calls: same tool, same arguments in any JSON notation."""
    try:
        arguments = msgspec.json.encode(read_json(call.arguments or "{}"), order="deterministic")
    except msgspec.DecodeError:
        arguments = call.arguments.encode()
    return call.name, arguments


class RepeatCounter(msgspec.Struct):
    """Counts how often calls were repeated with the same result and no other success in between."""

    last: dict[Signature, tuple[bytes, int]] = msgspec.field(default_factory=dict)
    """The last result of each call, as a hash, and how often the call has had it."""

    def add(self, call: ToolInvocation, output: Output, *, is_error: bool) -> None:
        """Record the result of a call."""
        signature, digest = make_signature(call), _digest(output)
        last = self.last.get(signature)
        if not is_error:
            # The run has made progress since the other calls.
            self.last.clear()
        count = last[1] if last is not None and last[0] == digest else 0
        self.last[signature] = digest, count + 1

    def count(self, signature: Signature) -> int:
        """Return how often the same call has had the same result."""
        return self.last[signature][1] if signature in self.last else 0

    def is_new(self, call: ToolInvocation, output: Output) -> bool:
        """Return True if the last identical call had another result."""
        last = self.last.get(make_signature(call))
        return last is not None and last[0] != _digest(output)


def add_warning(result: ToolResult) -> ToolResult:
    """Return the result with the warning about a repeated call."""
    if isinstance(result.output, str):
        return msgspec.structs.replace(result, output=f"{result.output}\n\n{WARNING}")
    return msgspec.structs.replace(result, output=[*result.output, {"type": "input_text", "text": WARNING}])


def _digest(output: Output) -> bytes:
    """Return a hash of a result, without the warning that may have been added to it."""
    if isinstance(output, str):
        plain: Output = output.removesuffix(f"\n\n{WARNING}")
    else:
        plain = [part for part in output if part.get("text") != WARNING]
    return sha256(msgspec.json.encode(plain)).digest()
