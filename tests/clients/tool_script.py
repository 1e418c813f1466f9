"""A model that only knows functions, and calls each kind of tool when it is asked to use it."""

from typing import Any


def use(tool: str, name: str, arguments: Any, *, heard: str) -> list[dict[str, Any]]:
    """Asked to use the tool, the model calls it by the name it has for it, and repeats what came of it."""
    return [
        {"user": f"use {tool}", "text": heard, "answers": [f"It said {heard}."]},
        {"user": f"use {tool}", "answers": [[{"tool_call": {"name": name, "arguments": arguments}}]]},
    ]


SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        *use("shell", "shell", {"commands": ["ls"]}, heard="ran ls"),
        *use("local_shell", "local_shell", {"command": ["ls", "-l"]}, heard="ran ls -l"),
        *use(
            "apply_patch",
            "apply_patch",
            {"type": "create_file", "path": "a.txt", "diff": "+hi"},
            heard="created a.txt",
        ),
        *use("draw", "draw", {"input": "a cat"}, heard="drew a cat"),
        *use("namespace", "sky__get_weather", {"city": "Bern"}, heard="mild"),
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
