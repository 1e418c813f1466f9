"""A turn of an agent over HTTP."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from antiphon.agent.execute.execution import MAX_ITERATIONS, SUPPRESSED
from antiphon.agent.loop_guard import WARNING
from antiphon.errors import ConfigError
from antiphon.server.agent import load_agent_tools
from support.agent_client import CLIENT_TOOL, PATH, AgentServer, results, texts
from support.live_server import HttpResponse, make_settings

Execute = Callable[..., HttpResponse]


@pytest.fixture(scope="module")
def target() -> Iterator[AgentServer]:
    server = AgentServer()
    yield server
    server.running.stop()


@pytest.fixture
def execute(target: AgentServer) -> Execute:
    return target.execute


@pytest.fixture
def sdk(target: AgentServer) -> OpenAI:
    return target.running.client("sk-ada")


def test_s2_14_continuation_id_is_stored_returned_and_accepted(execute: Execute, sdk: OpenAI) -> None:
    first = execute(Mode="ask", Instruction="hello", ConversationId="conv_1").json
    stored = sdk.responses.retrieve(first["ResponseContinuationId"])
    assert stored.output_text == first["Text"]
    second = execute(Mode="ask", Instruction="again", ResponseContinuationId=first["ResponseContinuationId"]).json
    assert sdk.responses.retrieve(second["ResponseContinuationId"]).previous_response_id == stored.id
    # The system message, the user's, the answer, and the user's next: each was sent exactly once.
    assert second["Text"].endswith("again (4)")


def test_agent_turn_returns_the_whole_envelope(execute: Execute) -> None:
    answer = execute(
        Mode="ask",
        Instruction="hello",
        ConversationId="conv_1",
        ConversationContextId="context_1",
        AgentContextId="agent_1",
    )
    envelope = answer.json
    raw = json.loads(envelope.pop("RawResponseJson"))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert envelope == {
        "Kind": "ok",
        "ConversationId": "conv_1",
        "TurnId": raw["id"],
        "AgentContextId": "agent_1",
        "ConversationContextId": "context_1",
        "ResponseContinuationId": raw["id"],
        "Mode": "ask",
        "ModelId": "scripted",
        "Text": "You said: [MODE: ask]\n\n[INSTRUCTION]\nhello (2)",
        "FinishReason": "stop",
        "Usage": {
            "PromptTokens": raw["usage"]["input_tokens"],
            "CompletionTokens": raw["usage"]["output_tokens"],
            "TotalTokens": raw["usage"]["total_tokens"],
            "CachedTokens": 0,
            "ReasoningTokens": 0,
        },
        "Sources": [],
        "FileBundle": None,
        "Warnings": [],
        "ErrorCode": None,
        "ErrorMessage": None,
        "ToolCalls": [],
    }


@pytest.mark.parametrize(
    "spelled",
    [
        {"mode": "ask", "instruction": "hello"},
        {"MODE": "ask", "INSTRUCTION": "hello", "tools_json": None, "conversation_id": None},
        {"Mode": "ask", "Instruction": "hello", "toolsJson": "[]", "ToolChoiceName": None, "Stream": None},
    ],
)
def test_field_names_are_accepted_in_any_case_and_nulls_are_omitted(execute: Execute, spelled: Any) -> None:
    answer = execute(**spelled)
    assert (answer.status, answer.json["Text"]) == (200, "You said: [MODE: ask]\n\n[INSTRUCTION]\nhello (2)")


def test_system_message_joins_server_prompt_client_prompt_and_tool_usage(execute: Execute, sdk: OpenAI) -> None:
    made = execute(Mode="ask", Instruction="hello", SystemPrompt="In short.").json
    items = sdk.responses.input_items.list(made["ResponseContinuationId"], order="asc").data
    assert [item.role for item in items] == ["system", "user"]
    system = texts(items[0])
    assert system[:2] == ["Be kind.", "In short."]
    assert "<<<APTIX_TOOL_USAGE_BEGIN name='look_up'>>>\nLook up what a word means.\n" in system[2]


def test_conversation_context_applies_to_later_turns(execute: Execute, sdk: OpenAI) -> None:
    context = {"ModelName": "other", "System": "Be brief.", "Temperature": 0.1}
    first = execute(Instruction="hello", ConversationContext=context).json
    second = execute(Instruction="again", ResponseContinuationId=first["ResponseContinuationId"]).json
    stored = [sdk.responses.retrieve(each["ResponseContinuationId"]) for each in (first, second)]
    assert [(each.model, each.temperature) for each in stored] == [("other", 0.1)] * 2
    items = sdk.responses.input_items.list(stored[0].id, order="asc").data
    assert texts(items[0])[0] == "Be brief."


def test_chunks_become_context_and_sources(execute: Execute, sdk: OpenAI) -> None:
    chunk = {"Id": "c1", "Path": "src/a.md", "StartLine": 3, "EndLine": 4, "Text": "Mild.", "SemanticId": "S1"}
    made = execute(Instruction="hello", RagChunks=[chunk, chunk | {"Id": "c2", "Score": -1}]).json
    assert made["Sources"] == [
        {
            "Tag": "S1",
            "Path": "src/a.md",
            "FileName": "a.md",
            "Start": 3,
            "End": 4,
            "Excerpt": "Mild.",
            "Symbol": None,
            "SymbolType": None,
        }
    ]
    assert made["Warnings"] == ["RagChunks: the best 1 of 2 are used."]
    user = sdk.responses.input_items.list(made["ResponseContinuationId"]).data[0]
    assert texts(user)[1].startswith("[CONTEXT]\n\n=== CHUNK 1 ===\nId: S1\nPath: src/a.md\nLines: 3-4\n")


def test_context_block_reaches_the_model_unchanged(execute: Execute, sdk: OpenAI) -> None:
    made = execute(Instruction="hello", RagContextBlock="[CONTEXT]\n\nnothing").json
    user = sdk.responses.input_items.list(made["ResponseContinuationId"]).data[0]
    assert (texts(user)[1], made["Sources"]) == ("[CONTEXT]\n\nnothing", [])


def test_client_tool_result_completes_the_turn(execute: Execute, sdk: OpenAI) -> None:
    first = execute(Mode="edit", Instruction="client tool", ToolsJson=json.dumps([CLIENT_TOOL])).json
    assert (first["Kind"], first["FinishReason"], first["Text"]) == ("tool-only", "tool_use", None)
    assert first["ToolCalls"] == [
        {
            "CallId": call_id,
            "Name": "open_file",
            "ArgumentsJson": arguments,
            "IsServerTool": False,
            "WasExecuted": False,
            "ResultJson": None,
            "ErrorMessage": None,
            "RequiresClientExecution": True,
            "ExecutionMs": None,
        }
        for call_id, arguments in (("call_1", '{"path":"a"}'), ("call_2", "{}"))
    ]
    outcomes = [
        {"callId": "call_1", "name": "open_file", "resultJson": '{"content":"paper"}'},
        {"callId": "call_2", "name": "open_file", "errorMessage": "no such file"},
    ]
    second = execute(
        Mode="edit",
        Instruction="go on",
        ResponseContinuationId=first["ResponseContinuationId"],
        ToolResultsJson=json.dumps(outcomes),
    ).json
    assert (second["Kind"], second["Text"], second["ToolCalls"], second["Warnings"]) == (
        "ok",
        "The file says paper.",
        [],
        [],
    )
    # C11: the outputs first, and the text block as well.
    items = sdk.responses.input_items.list(second["ResponseContinuationId"], order="asc").data
    assert [(item.type, getattr(item, "call_id", None), getattr(item, "output", None)) for item in items] == [
        ("function_call_output", "call_1", '{"content":"paper"}'),
        ("function_call_output", "call_2", '{"error":"no such file"}'),
        ("message", None, None),
    ]
    assert texts(items[2])[1].startswith("[TOOL_RESULTS]\n\n- CallId: call_1\n  Name: open_file\n")
    # The tools apply although the client did not send them again.
    stored = sdk.responses.retrieve(second["ResponseContinuationId"])
    assert [tool.name for tool in stored.tools] == ["open_file", "look_up", "read_mood", "explode"]


def test_server_tool_runs_until_the_model_calls_none(execute: Execute) -> None:
    made = execute(Instruction="define it").json
    raw = json.loads(made["RawResponseJson"])
    assert (made["Kind"], made["Text"], made["FinishReason"], made["ToolCalls"], made["Warnings"]) == (
        "ok",
        "It is a call and its answer.",
        "stop",
        [],
        [],
    )
    assert made["Usage"]["TotalTokens"] > raw["usage"]["total_tokens"], "the usage is that of the whole turn"


def test_client_calls_are_returned_with_the_server_tool_results(execute: Execute) -> None:
    first = execute(Instruction="both", ToolsJson=json.dumps([CLIENT_TOOL])).json
    took = first["ToolCalls"][0].pop("ExecutionMs")
    assert isinstance(took, int)
    assert (first["Kind"], first["Text"]) == ("ok", "Both.")
    assert first["ToolCalls"] == [
        {
            "CallId": "call_s",
            "Name": "look_up",
            "ArgumentsJson": '{"word":"x"}',
            "IsServerTool": True,
            "WasExecuted": True,
            "ResultJson": '{"word":"x","meaning":"a call and its answer"}',
            "ErrorMessage": None,
            "RequiresClientExecution": False,
        },
        {
            "CallId": "call_c",
            "Name": "open_file",
            "ArgumentsJson": "{}",
            "IsServerTool": False,
            "WasExecuted": False,
            "ResultJson": None,
            "ErrorMessage": None,
            "RequiresClientExecution": True,
            "ExecutionMs": None,
        },
    ]
    outcomes = results(("call_s", first["ToolCalls"][0]["ResultJson"]), ("call_c", {"content": "paper"}))
    second = execute(
        Instruction="go on", ResponseContinuationId=first["ResponseContinuationId"], ToolResultsJson=outcomes
    )
    assert second.json["Text"] == "The file says paper."


def test_client_call_with_the_id_of_an_earlier_server_call_is_returned(execute: Execute) -> None:
    """A model may use a call id twice in a turn. The result of the first call is not that of the second."""
    (returned,) = execute(Instruction="one id", ToolsJson=json.dumps([CLIENT_TOOL])).json["ToolCalls"]
    assert returned == {
        "CallId": "call_1",
        "Name": "open_file",
        "ArgumentsJson": "{}",
        "IsServerTool": False,
        "WasExecuted": False,
        "ResultJson": None,
        "ErrorMessage": None,
        "RequiresClientExecution": True,
        "ExecutionMs": None,
    }


def test_tool_error_is_sent_to_the_model(execute: Execute, sdk: OpenAI) -> None:
    made = execute(Instruction="explode").json
    assert made["Text"] == "It went off."
    items = sdk.responses.input_items.list(made["ResponseContinuationId"], order="asc").data
    assert [json.loads(item.output)["error"].split(":")[0].split(".")[0] for item in items] == [
        "ValueError",
        "There is no tool 'nobody'",
    ]


def test_repeated_call_is_warned_then_faked_then_stopped(execute: Execute, sdk: OpenAI) -> None:
    made = execute(Instruction="circles").json
    assert (made["Text"], made["Warnings"]) == (
        "This is all I have.",
        [f"The model was stopped after {MAX_ITERATIONS} iterations."],
    )
    outputs, response_id = [], made["ResponseContinuationId"]
    while len(outputs) < MAX_ITERATIONS - 1:
        items = sdk.responses.input_items.list(response_id).data
        outputs += [item.output for item in items if item.type == "function_call_output"]
        response_id = sdk.responses.retrieve(response_id).previous_response_id
    plain = '{"word":"same","meaning":"a call and its answer"}'
    assert outputs[::-1] == [plain, f"{plain}\n\n{WARNING}", *[SUPPRESSED] * (MAX_ITERATIONS - 3)]


def test_client_tool_may_have_any_name(execute: Execute) -> None:
    tools = json.dumps([{"type": "function", "name": "my.tool/1"}])
    made = execute(Instruction="odd name", ToolsJson=tools).json
    assert [(each["Name"], each["RequiresClientExecution"]) for each in made["ToolCalls"]] == [("my.tool/1", True)]


def test_custom_tool_is_a_client_tool(execute: Execute, sdk: OpenAI) -> None:
    tools = json.dumps([{"type": "custom", "name": "patch"}])
    first = execute(Instruction="custom", ToolsJson=tools).json
    assert [(each["Name"], each["ArgumentsJson"]) for each in first["ToolCalls"]] == [("patch", "diff")]
    second = execute(
        Instruction="go on",
        ResponseContinuationId=first["ResponseContinuationId"],
        ToolResultsJson=results(("call_p", "done")),
    ).json
    items = sdk.responses.input_items.list(second["ResponseContinuationId"], order="asc").data
    assert (items[0].type, items[0].output) == ("custom_tool_call_output", "done")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("outcomes", "param", "code"),
    [
        (None, "ToolResultsJson", "tool_results_mismatch"),
        ("[]", "ToolResultsJson", "tool_results_mismatch"),
        (results(("call_1", 1)), "ToolResultsJson", "tool_results_mismatch"),
        (results(("call_2", 1), ("call_1", 1)), "ToolResultsJson", "tool_results_mismatch"),
        (results(("call_1", 1), ("call_x", 1)), "ToolResultsJson", "tool_results_mismatch"),
        (results(("call_1", 1), ("call_2", 1), ("call_3", 1)), "ToolResultsJson", "tool_results_mismatch"),
        (results(("call_1", 1), ("call_2", None)), "ToolResultsJson[1]", "invalid_tool_result"),
        (
            json.dumps([{"CallId": "call_1", "ResultJson": 1, "ErrorMessage": "no"}, {"CallId": "call_2"}]),
            "ToolResultsJson[0]",
            "invalid_tool_result",
        ),
        ("nonsense", "ToolResultsJson", "invalid_json"),
        ('{"CallId": "call_1"}', "ToolResultsJson", "invalid_type"),
        ("[1, 2]", "ToolResultsJson[0]", "invalid_type"),
        ('[{"Name": "open_file"}]', "ToolResultsJson[0].CallId", "missing_required_parameter"),
    ],
)
def test_agn_033_results_that_do_not_match_the_calls_are_refused(
    execute: Execute, outcomes: str | None, param: str, code: str
) -> None:
    first = execute(Instruction="client tool", ToolsJson=json.dumps([CLIENT_TOOL])).json
    answer = execute(
        Instruction="go on", ResponseContinuationId=first["ResponseContinuationId"], ToolResultsJson=outcomes
    )
    error = json.loads(answer.json["RawResponseJson"])["error"]
    assert (answer.status, answer.json["Kind"], answer.json["ErrorCode"]) == (400, "error", "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert answer.json["ErrorMessage"] == error["message"]


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        ({"ToolsJson": "{"}, "ToolsJson is ignored: it is not a JSON array."),
        ({"ToolResultsJson": "[]"}, "ToolResultsJson is ignored: it applies only to a continuation."),
    ],
)
def test_malformed_text_block_is_a_warning(execute: Execute, body: dict[str, str], warning: str) -> None:
    answer = execute(Instruction="hello", **body)
    assert (answer.status, answer.json["Kind"], answer.json["Warnings"]) == (200, "ok", [warning])


def test_field_not_allowed_in_a_continuation_is_a_warning(execute: Execute) -> None:
    first = execute(Instruction="hello").json
    second = execute(
        Instruction="again",
        ResponseContinuationId=first["ResponseContinuationId"],
        ToolsJson="[]",
        ToolResultsJson="{",
    )
    assert second.json["Warnings"] == [
        "ToolsJson is ignored: it applies only to the first turn.",
        "ToolResultsJson is ignored: it contains no results.",
    ]


def test_results_without_calls_reach_the_model_as_text(execute: Execute, sdk: OpenAI) -> None:
    first = execute(Instruction="hello").json
    second = execute(
        Instruction="again",
        ResponseContinuationId=first["ResponseContinuationId"],
        ToolResultsJson=results(("call_9", "{}")),
    ).json
    (item,) = sdk.responses.input_items.list(second["ResponseContinuationId"]).data
    assert texts(item)[1] == "[TOOL_RESULTS]\n\n- CallId: call_9\n  Name: (missing)\n  ResultJson:\n    {}"


def test_agent_unknown_fields_are_listed_in_a_header(execute: Execute) -> None:
    answer = execute(Instruction="hello", Colour="red")
    assert (answer.status, answer.headers["x-antiphon-warnings"]) == (200, "ignored: Colour")


def test_engine_warnings_are_in_the_envelope(serve: Any) -> None:
    running = serve({"native_tools": ["function"]})
    made = running.ask("POST", PATH, {"Instruction": "hello", "ToolsJson": '[{"type": "web_search"}]'}).json
    (warning,) = made["Warnings"]
    assert "web_search" in warning


def test_truncated_output_is_marked(execute: Execute) -> None:
    made = execute(Instruction="cut off").json
    assert (made["Kind"], made["Text"], made["FinishReason"]) == ("ok", "So ", "length")


def test_refusal_is_the_answer(execute: Execute) -> None:
    made = execute(Instruction="refuse").json
    assert (made["Kind"], made["Text"], made["FinishReason"]) == ("ok", "Not that.", "stop")


def test_turn_without_output_is_empty(execute: Execute) -> None:
    made = execute(Instruction="silent").json
    assert (made["Kind"], made["Text"], made["ErrorMessage"]) == ("empty", None, None)


def test_continuation_of_another_project_is_not_found(execute: Execute) -> None:
    first = execute(Instruction="hello").json
    answer = execute("sk-bob", Instruction="again", ResponseContinuationId=first["ResponseContinuationId"])
    error = json.loads(answer.json["RawResponseJson"])["error"]
    assert (answer.status, error["code"], error["param"]) == (
        400,
        "previous_response_not_found",
        "ResponseContinuationId",
    )


def test_agent_requires_a_key(execute: Execute) -> None:
    assert execute("sk-eve", Instruction="hello").status == 401


def test_agent_defaults_are_the_first_model_and_no_tools(serve: Any) -> None:
    running = serve({"models": ["first", "second"]})
    made = running.ask("POST", PATH, {"Instruction": "hello"}).json
    raw = json.loads(made["RawResponseJson"])
    assert (made["ModelId"], raw["tools"], raw["temperature"]) == ("first", [], 0.7)


def test_agent_model_and_temperature_are_configurable(serve: Any) -> None:
    running = serve({"models": ["first", "second"]}, agent_model="second", agent_temperature=0.2)
    made = running.ask("POST", PATH, {"Instruction": "hello"}).json
    assert (made["ModelId"], json.loads(made["RawResponseJson"])["temperature"]) == ("second", 0.2)


def test_stateless_server_has_no_agent(serve: Any) -> None:
    assert serve(stateless=True).ask("POST", PATH, {"Instruction": "hello"}).status == 404


def test_unusable_tool_prevents_server_start(tmp_path: Path) -> None:
    code = 'from antiphon import tool\n\n@tool(needs_approval=True)\ndef pay() -> str:\n    """Pay."""\n    return ""\n'
    (tmp_path / "paying.py").write_text(code)
    path = str(tmp_path / "paying.py")
    refusals = {}
    for names in (("nowhere",), (path,), (f"{path}:pay", f"{path}:pay")):
        with pytest.raises(ConfigError) as refused:
            load_agent_tools(make_settings(agent_tools=names))
        refusals[names[0]] = refused.value.message
    assert refusals == {
        "nowhere": "agent_tools: There is no module 'nowhere' to load tools from.",
        path: "agent_tools: the tool 'pay' needs approval, and a server cannot ask for it.",
        f"{path}:pay": "agent_tools: There are two tools called 'pay'.",
    }
