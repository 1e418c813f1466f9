"""Tools of each type, and forms of `tool_choice`."""

from typing import Any

import pytest

from behaviour.samples import CALLED, CHOICES, FUNCTION, FUNCTION_ECHO, TOOLS
from behaviour.wire import ask, refuse
from manifest import names


def test_function_is_called(server: Any) -> None:
    response = ask(server, "call", tools=[FUNCTION])
    (call,) = response["output"]
    assert (response["status"], response["tools"], call["type"], call["name"]) == (
        "completed",
        [FUNCTION_ECHO],
        "function_call",
        "look_up",
    )


WEB_SEARCH = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
HOSTED = ("file_search", "mcp", "code_interpreter", "image_generation", "programmatic_tool_calling")
CLIENT_TOOLS = [
    name for name in names("tools", "implemented") if name != "function" and name not in (*HOSTED, *WEB_SEARCH)
]


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_client_tool_is_called(server: Any, name: str) -> None:
    response = ask(server, f"use {name}!", tools=[TOOLS[name]])
    assert (response["status"], [item["type"] for item in response["output"]]) == ("completed", [CALLED[name][1]])


@pytest.mark.parametrize("name", HOSTED)
def test_unsupported_tool_is_rejected_with_its_path(server: Any, name: str) -> None:
    assert refuse(server, {"tools": [FUNCTION, TOOLS[name]]}) == (400, "tools[1]", "unsupported_tool")


@pytest.mark.parametrize("name", WEB_SEARCH)
def test_web_search_is_dropped_with_a_warning(server: Any, name: str) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", "tools": [FUNCTION, TOOLS[name]]})
    assert (answer.json["tools"], answer.headers["x-antiphon-warnings"]) == (
        [FUNCTION_ECHO],
        f"tools[1]: {name} is not available here and was left out",
    )


@pytest.mark.parametrize(
    "name", [name for name in names("choices", "implemented") if name not in (*HOSTED, *WEB_SEARCH)]
)
def test_tool_choice_is_accepted_and_echoed(server: Any, name: str) -> None:
    choice = CHOICES.get(name, {"type": name})
    offered = [FUNCTION, *(TOOLS[each] for each in ("custom", "shell", "apply_patch", "computer"))]
    inputs = {"none": "hi", "custom": "use custom!", "shell": "use shell!", "apply_patch": "use apply_patch!"}
    text = "use computer!" if name.startswith("computer") else inputs.get(name, "call")
    response = ask(server, text, tools=offered, tool_choice=choice)
    assert (response["tool_choice"], response["status"]) == (choice, "completed")


@pytest.mark.parametrize("name", [name for name in names("choices") if name in (*HOSTED, *WEB_SEARCH)])
def test_choice_of_an_absent_tool_is_rejected(server: Any, name: str) -> None:
    choice = CHOICES.get(name, {"type": name})
    assert refuse(server, {"tools": [FUNCTION], "tool_choice": choice}) == (400, "tool_choice", "unsupported_tool")
