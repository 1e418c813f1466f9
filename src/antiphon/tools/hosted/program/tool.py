"""The hosted tool programmatic_tool_calling: the model writes JavaScript that calls the tools of the request.

This module describes the tool to the model. `engine/serve/hosted/programs.py` runs the calls of a program, because they
belong to other tools.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import msgspec

from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.base import (
    ApprovedCall,
    HostedCall,
    HostedContext,
    HostedFunction,
    HostedSession,
    HostedSetup,
    HostedTool,
    HostedUnavailable,
)
from antiphon.tools.hosted.program.runner import ProgramRunner

NAME = "programmatic_tool_calling"
_TYPES = frozenset({NAME})
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*", re.ASCII)
_DESCRIPTION = """\
Run a JavaScript program that calls tools. Use it to make several calls, to use the result of one call in another, or \
to reduce large results before you read them. The code is the body of an async function, so `await` works everywhere. \
Each tool is an async function that takes one object: `const result = await tools.name({"key": "value"})`. Use \
Promise.all for calls that do not depend on each other. A call that fails throws an Error. Only output that is \
passed to `text(value)` is returned to you, and images that are passed to `image(url)`. There is no console, network, \
file, module or timer, and no variable is kept for the next program."""
_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The JavaScript code to run."}},
    "required": ["code"],
    "additionalProperties": False,
}


class ProgramTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that programs can call. One with `takes_text` is called with a string.

    `returns` describes the value of a call. With an `output_schema`, the value is JSON of this schema.
    """

    name: str
    description: str
    parameters: JsonObject | None = None
    output_schema: JsonObject | None = None
    takes_text: bool = False
    returns: str = "a string"


class ProgramHost(Protocol):
    """The part of the engine that runs programs and their calls."""

    def list_tools(self) -> Sequence[ProgramTool]:
        """Return the tools that a program can call now."""

    def list_pending(self) -> Sequence[ApprovedCall]:
        """Return the program of the context that waits for results which the context has now."""

    def begin(self, key: str) -> HostedCall:
        """Begin a call of the tool."""


class ProgramHostedTool(HostedTool):
    types = _TYPES

    def __init__(self, setup: HostedSetup) -> None:
        self._runner = ProgramRunner(setup.settings.programs)

    async def close(self) -> None:
        self._runner.close()

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        return ProgramSession(self._runner, context)


def create(setup: HostedSetup) -> ProgramHostedTool:
    """Create the tool. Raises HostedUnavailable if it is switched off or its package is missing."""
    if not setup.settings.programs.enabled:
        raise HostedUnavailable(_TYPES, "Programs are switched off (setting programs.enabled).")
    if find_spec("py_mini_racer") is None:
        raise HostedUnavailable(_TYPES, "Programs need a package: pip install 'antiphon[code]'.")
    return ProgramHostedTool(setup)


class ProgramSession(HostedSession):
    """The programs of one response. The engine sets `host` before anything else is read."""

    label = "programs"
    host: ProgramHost

    def __init__(self, runner: ProgramRunner, context: HostedContext) -> None:
        self.runner = runner
        self.context = context

    @property
    def functions(self) -> Sequence[HostedFunction]:  # type: ignore[override]
        description = describe_tools(self.host.list_tools())
        return (HostedFunction(name=NAME, description=description, parameters=_PARAMETERS),)

    @property
    def pending(self) -> Sequence[ApprovedCall]:  # type: ignore[override]
        return self.host.list_pending()

    def begin(self, name: str, key: str) -> HostedCall:
        return self.host.begin(key)


def describe_tools(tools: Sequence[ProgramTool]) -> str:
    """Return the description of the function, with all tools that a program can call."""
    lines = [_describe_tool(tool) for tool in tools]
    return "\n".join([_DESCRIPTION, "Tools:", *lines]) if lines else f"{_DESCRIPTION}\nThere are no tools to call."


def _describe_tool(tool: ProgramTool) -> str:
    path = f"tools.{tool.name}" if _IDENTIFIER.fullmatch(tool.name) else f"tools[{_dump(tool.name)}]"
    argument = "text" if tool.takes_text else "arguments"
    line = f"- {path}({argument})"
    if tool.description:
        line += f": {tool.description.strip()}"
    if tool.parameters:
        line += f" Arguments: {_dump(tool.parameters)}"
    returns = f"JSON of the schema {_dump(tool.output_schema)}, parsed" if tool.output_schema else tool.returns
    return f"{line} Returns {returns}."


def _dump(value: object) -> str:
    return msgspec.json.encode(value).decode()
