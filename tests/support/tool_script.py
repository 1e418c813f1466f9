"""Script of a model that supports only functions and calls the tool that the user message names."""

from typing import Any


def use(tool: str, name: str, arguments: Any, *, output: str) -> list[dict[str, Any]]:
    """Return rules for "use TOOL": the model calls the function `name`, then repeats the output of the tool."""
    return [
        {"user": f"use {tool}", "text": output, "answers": [f"It said {output}."]},
        {"user": f"use {tool}", "answers": [[{"tool_call": {"name": name, "arguments": arguments}}]]},
    ]


SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        *use("shell", "shell", {"commands": ["ls"]}, output="ran ls"),
        *use("local_shell", "local_shell", {"command": ["ls", "-l"]}, output="ran ls -l"),
        *use(
            "apply_patch",
            "apply_patch",
            {"type": "create_file", "path": "a.txt", "diff": "+hi"},
            output="created a.txt",
        ),
        *use("draw", "draw", {"input": "a cat"}, output="drew a cat"),
        *use("namespace", "sky__get_weather", {"city": "Bern"}, output="mild"),
        {"user": "use search", "text": "mild", "answers": ["It said mild."]},
        {
            "user": "use search",
            "text": "can be called now: get_weather",
            "answers": [[{"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}]],
        },
        {
            "user": "use search",
            "answers": [[{"tool_call": {"name": "tool_search", "arguments": {"query": "weather"}}}]],
        },
    ],
}
