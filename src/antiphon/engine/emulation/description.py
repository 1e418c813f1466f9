"""What of a request is emulated, in words for whoever sent it."""

from antiphon.backends.base import Capabilities
from antiphon.engine.emulation.lowering import wants_json
from antiphon.protocol.request import CreateRequest


def describe(request: CreateRequest, native: Capabilities) -> list[str]:
    """One line for each thing that the backend, which can do what `native` says, does with help alone."""
    told: list[str] = []
    if not native.json_schema and wants_json(request):
        told.append("text.format: the model is told of it and its answer is checked")
    if native.any_tool:
        return told
    for index, tool in enumerate(request.tools or ()):
        if tool.type not in native.tools:
            means = "functions" if tool.type == "namespace" else "a function"
            told.append(f"tools[{index}]: {tool.type} is emulated by {means}")
    return told
