"""Complaints C30 to C41, D48 and D49: the tools of Codex with a model that supports only functions."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from behaviour.item_samples import ITEMS
from behaviour.wire import Json, ask, refuse, say
from support.live_server import LiveServer, make_settings
from support.tool_emulation import Recorder, call

GET = {
    "type": "function",
    "name": "get_issue",
    "description": "Get an issue.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    "strict": False,
}
MCP = {"type": "namespace", "name": "mcp__github", "description": "Tools of GitHub.", "tools": [GET]}
EXEC = GET | {"name": "exec_command", "description": "Runs a command."}
PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF)+
%import common.LF
"""
PATCH_TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
PATCH = "*** Begin Patch\n*** Add File: a.txt\n+hi\n*** End Patch\n"
PATCHED = {
    "type": "custom_tool_call",
    "call_id": "call_1",
    "name": "apply_patch",
    "input": PATCH,
    "status": "completed",
}


class Watched(LiveServer):
    """A server whose model records its turns."""

    backend: Recorder

    def __init__(self, settings: Any, *steps: Any, **script: Any) -> None:
        super().__init__({}, settings, backend=Recorder(script | ({"default": list(steps)} if steps else {})))

    @property
    def shown(self) -> list[Any]:
        return self.backend.turns[-1].request.tools or []


Watch = Callable[..., Watched]


@pytest.fixture
def watch() -> Iterator[Watch]:
    started: list[Watched] = []

    def start(*steps: Any, settings: Json | None = None, **script: Any) -> Watched:
        started.append(Watched(make_settings(**(settings or {})), *steps, **script))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def called(response: Json) -> list[tuple[str, str | None, str]]:
    return [(item["type"], item.get("namespace"), item.get("name", "")) for item in response["output"]]


def test_pain_c_30_tool_of_a_namespace_is_called(watch: Watch) -> None:
    server = watch(call("mcp__github__get_issue", {"number": 1}))
    assert called(ask(server, "hi", tools=[MCP])) == [("function_call", "mcp__github", "get_issue")]


@pytest.mark.parametrize("name", ["mcp__github.get_issue", "mcp__github/get_issue", "mcp.github.get_issue"])
def test_pain_c_30_model_may_write_another_separator(watch: Watch, name: str) -> None:
    """Codex rejects a call by any other name than the one in the namespace: "unsupported call"."""
    server = watch(call(name, {"number": 1}))
    assert called(ask(server, "hi", tools=[MCP])) == [("function_call", "mcp__github", "get_issue")]


def test_pain_c_30_ambiguous_name_is_not_changed(watch: Watch) -> None:
    server = watch(call("mcp.github.get_issue", {"number": 1}))
    other = GET | {"name": "mcp_github_get_issue"}
    assert called(ask(server, "hi", tools=[MCP, other])) == [("function_call", None, "mcp.github.get_issue")]


@pytest.mark.parametrize("tool", [MCP, PATCH_TOOL, {"type": "tool_search"}, {"type": "shell"}, {"type": "apply_patch"}])
def test_pain_c_31_tools_other_than_functions_are_accepted(watch: Watch, tool: Json) -> None:
    assert ask(watch({"text": "Ok."}), "hi", tools=[tool])["status"] == "completed"


def test_pain_c_32_no_tool_is_dropped_silently(watch: Watch) -> None:
    server = watch({"text": "Ok."})
    ask(server, "hi", tools=[EXEC, MCP, PATCH_TOOL, {"type": "local_shell"}, {"type": "computer"}])
    assert [tool.name for tool in server.shown] == [
        "exec_command",
        "mcp__github__get_issue",
        "apply_patch",
        "local_shell",
        "computer",
    ]


def test_pain_c_33_namespace_tool_keeps_description_and_parameters(watch: Watch) -> None:
    server = watch({"text": "Ok."})
    ask(server, "hi", tools=[MCP])
    (tool,) = server.shown
    assert (tool.type, tool.description, tool.parameters) == (
        "function",
        "Get an issue.\n\nAll tools of mcp__github: Tools of GitHub.",
        GET["parameters"],
    )


def test_pain_c_34_freeform_patch_tool_becomes_a_function(watch: Watch) -> None:
    server = watch(call("apply_patch", {"input": PATCH}))
    (item,) = ask(server, "hi", tools=[PATCH_TOOL])["output"]
    assert item | {"id": None} == PATCHED | {"id": None}
    assert server.shown[0].parameters["properties"] == {"input": {"type": "string"}}


@pytest.mark.parametrize("form", ["{patch}", '{{"input": {json}}}', '{{"patch": {json}}}', "{json}"])
def test_pain_c_35_json_input_of_a_freeform_tool_becomes_plain_text(watch: Watch, form: str) -> None:
    written = form.format(patch=PATCH, json=json.dumps(PATCH))
    for tool in (PATCH_TOOL, PATCH_TOOL | {"format": {"type": "text"}}):
        server = watch(call("apply_patch", written))
        assert ask(server, "hi", tools=[tool])["output"][0]["input"] == PATCH


def test_pain_c_36_apply_patch_works_with_any_model(watch: Watch) -> None:
    server = watch(call("apply_patch", {"type": "create_file", "path": "a.txt", "diff": "+hi"}))
    (item,) = ask(server, "hi", tools=[{"type": "apply_patch"}])["output"]
    assert (item["type"], item["operation"]["path"]) == ("apply_patch_call", "a.txt")


def test_pain_c_37_tool_search_in_the_history_is_accepted(watch: Watch) -> None:
    server = watch({"text": "Ok."})
    history = [say("user", "hi"), ITEMS["tool_search_call"], ITEMS["tool_search_output"], say("user", "go on")]
    assert ask(server, history)["status"] == "completed"
    assert [tool.name for tool in server.shown] == ["look_up"]


def test_pain_c_38_additional_tools_keep_their_types(watch: Watch) -> None:
    server = watch(call("apply_patch", {"input": PATCH}))
    additional = {"type": "additional_tools", "role": "developer", "tools": [EXEC, PATCH_TOOL, MCP]}
    assert called(ask(server, [additional, say("user", "hi")])) == [("custom_tool_call", None, "apply_patch")]


def test_pain_c_39_command_tool_is_called(watch: Watch) -> None:
    server = watch(call("exec_command", {"cmd": "ls"}))
    assert called(ask(server, "hi", tools=[EXEC])) == [("function_call", None, "exec_command")]


def test_pain_c_40_codex_request_is_accepted(watch: Watch) -> None:
    server = watch({"text": "Done."})
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"}
    response = ask(
        server,
        [say("developer", "You are an agent."), say("user", "hi"), ITEMS["reasoning"], PATCHED, output],
        tools=[EXEC, MCP, PATCH_TOOL, {"type": "web_search", "external_web_access": False}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"session": "s"},
    )
    assert response["status"] == "completed"


HOSTED_CALLS = {
    "web_search_call": {"action": {"type": "search", "query": "q"}},
    "image_generation_call": {"result": "aGk="},
    "file_search_call": {"queries": ["q"]},
    "code_interpreter_call": {"code": "1", "container_id": "cntr_1"},
    "mcp_call": {"name": "f", "server_label": "s", "arguments": "{}"},
    "mcp_list_tools": {"server_label": "s", "tools": []},
    "computer_call": {"call_id": "call_1", "action": {"type": "screenshot"}, "pending_safety_checks": []},
    "local_shell_call": {"call_id": "call_1", "action": {"type": "exec", "command": ["ls"], "env": None}},
}
HOSTED_OUTPUTS: dict[str, Json] = {
    "computer_call": {"call_id": "call_1", "output": {"type": "computer_screenshot", "file_id": "file_1"}},
    "local_shell_call": {"id": "call_1", "output": "a.txt"},
}


@pytest.mark.parametrize("kind", HOSTED_CALLS)
def test_pain_c_40_call_without_an_id_is_accepted(watch: Watch, kind: str) -> None:
    """Codex omits the ids of web searches and of local shell calls. openai/codex, codex-rs/protocol/src/models.rs"""
    history = [say("user", "hi"), HOSTED_CALLS[kind] | {"type": kind}]
    if kind in HOSTED_OUTPUTS:
        history.append(HOSTED_OUTPUTS[kind] | {"type": f"{kind}_output"})
    server = watch({"text": "Done."})
    response = ask(server, [*history, say("user", "go on")])
    assert response["status"] == "completed"
    listed = server.ask("GET", f"/v1/responses/{response['id']}/input_items?order=asc").json["data"]
    kinds = [item.get("type", "message") for item in history]
    assert [item["type"] for item in listed] == [*kinds, "message"]
    ids = {item["id"] for item in listed}
    assert "" not in ids
    assert len(ids) == len(listed)


def test_pain_c_41_unsupported_tool_can_be_dropped(watch: Watch) -> None:
    search = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    assert refuse(watch(), {"tools": [EXEC, search]}) == (400, "tools[1]", "unsupported_tool")
    server = watch({"text": "Ok."}, settings={"unsupported_tools": "drop"})
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", "tools": [EXEC, search]})
    assert (answer.status, [tool["name"] for tool in answer.json["tools"]]) == (200, ["exec_command"])
    assert "tools[1]: file_search is not available here and was left out" in answer.headers["x-antiphon-warnings"]


def test_pain_d_48_all_tool_searches_are_executed(watch: Watch) -> None:
    tools = [EXEC | {"defer_loading": True}, MCP | {"tools": [GET | {"defer_loading": True}]}, {"type": "tool_search"}]
    searches = [call("tool_search", {"query": "command"}), call("tool_search", {"query": "issue"}, "call_2")]
    server = watch(*searches, rules=[{"last_item": "function_call_output", "answers": ["Found."]}])
    response = ask(server, "hi", tools=tools)
    assert [item["type"] for item in response["output"]] == ["tool_search_call", "tool_search_output"] * 2 + ["message"]
    assert {tool.name for tool in server.shown} == {"exec_command", "mcp__github__get_issue"}


def test_pain_d_49_schema_is_enforced_with_reasoning(watch: Watch) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    server = watch(
        {"reasoning": "So many."},
        {"text": '{"n": "one"}'},
        rules=[{"user": "is not of type 'integer'", "answers": [[{"reasoning": "Oh."}, {"text": '{"n": 1}'}]]}],
        lacks=["json_schema"],
    )
    response = ask(server, "hi", text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    (message,) = (item for item in response["output"] if item["type"] == "message")
    assert message["content"][0]["text"] == '{"n": 1}'
