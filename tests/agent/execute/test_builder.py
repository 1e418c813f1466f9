"""S1: building a request from an agent's turn. Each test names the contract lines that it covers."""

import itertools
import json
from typing import Any

import pytest

from antiphon.agent.execute.builder import ResponsesRequestBuilder, build_tool_results, build_usage_block
from antiphon.agent.execute.envelope import AgentExecuteRequest, ConversationContext

CONTEXT = ConversationContext(model_name="gpt-5.1", temperature=0.7, system="You are Aptix.")
TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
RESULTS = json.dumps([{"CallId": "call_1", "Name": "look_up", "ResultJson": '{"found": true}'}])


def build(*blocks: Any, context: ConversationContext = CONTEXT, options: Any = None, **fields: Any) -> Any:
    request = AgentExecuteRequest(**({"mode": "QA", "instruction": "Why?"} | fields))
    return ResponsesRequestBuilder.build(context, request, *blocks, **(options or {}))


def texts(message: dict[str, Any]) -> list[str]:
    return [part["text"] for part in message["content"]]


def test_s1_1_s1_2_s1_5_s1_6_initial_request_has_exact_form() -> None:
    assert build() == {
        "model": "gpt-5.1",
        "temperature": 0.7,
        "input": [
            {"role": "system", "content": [{"type": "input_text", "text": "You are Aptix."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "[MODE: QA]\n\n[INSTRUCTION]\nWhy?"}]},
        ],
    }


def test_s1_5_s1_10_continuation_has_exact_form() -> None:
    built = build(None, "<<<usage>>>", response_continuation_id="resp_1", system_prompt="Be brief.")
    assert built == {
        "model": "gpt-5.1",
        "temperature": 0.7,
        "previous_response_id": "resp_1",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "[MODE: QA]\n\n[INSTRUCTION]\nWhy?"}]},
        ],
    }


def test_c1_c2_the_aptix_dialect_has_the_seeds_own_words() -> None:
    built = build(tool_choice_name="look_up", options={"dialect": "aptix"})
    assert {part["type"] for message in built["input"] for part in message["content"]} == {"text"}
    assert built["tool_choice"] == {"type": "tool", "name": "look_up"}


@pytest.mark.parametrize("stream", [True, False, None])
def test_s1_3_stream_is_passed_on_and_absent_by_default(stream: bool | None) -> None:
    built = build(options={"stream": stream})
    assert built.get("stream", "absent") == ("absent" if stream is None else stream)


@pytest.mark.parametrize("blank", [None, "", "  ", "\n"])
def test_s1_4_a_blank_continuation_id_begins_a_conversation(blank: str | None) -> None:
    built = build(response_continuation_id=blank)
    assert "previous_response_id" not in built
    assert [message["role"] for message in built["input"]] == ["system", "user"]


@pytest.mark.parametrize("system", [None, ""])
def test_s1_7_system_prompt_is_always_present(system: str | None) -> None:
    context = ConversationContext(model_name="m", temperature=0.0, system=system)
    assert texts(build(context=context)["input"][0]) == [""]


@pytest.mark.parametrize(
    ("prompt", "usage"), [*itertools.product([None, "", " \t\n", "  Be brief. "], [None, "", "<<<usage>>>"])]
)
def test_s1_8_s1_9_s1_22_system_prompt_and_usage_block_follow_in_order(prompt: str | None, usage: str | None) -> None:
    expected = ["You are Aptix."]
    expected += [prompt] if prompt and prompt.strip() else []
    expected += [usage] if usage else []
    assert texts(build(None, usage, system_prompt=prompt)["input"][0]) == expected


def test_s1_11_s1_12_the_user_message_is_one_and_its_first_text_exact() -> None:
    built = build(mode="CODE_EDIT", instruction="  line 1\r\nline 2 \n")
    users = [message for message in built["input"] if message["role"] == "user"]
    assert [texts(user) for user in users] == [["[MODE: CODE_EDIT]\n\n[INSTRUCTION]\n  line 1\r\nline 2 \n"]]


@pytest.mark.parametrize("block", [None, "", "  \n", "[CONTEXT]\n\n=== CHUNK 1 ===\n"])
@pytest.mark.parametrize("continuation", [None, "resp_1"])
def test_s1_13_a_rag_block_follows_the_instruction_verbatim(block: str | None, continuation: str | None) -> None:
    user = build(block, response_continuation_id=continuation)["input"][-1]
    assert texts(user)[1:] == ([block] if block and block.strip() else [])


def test_s1_14_tool_results_come_last_and_on_a_continuation_only() -> None:
    block = '[TOOL_RESULTS]\n\n- CallId: call_1\n  Name: look_up\n  ResultJson:\n    {"found": true}'
    user = build("[CONTEXT]", response_continuation_id="resp_1", tool_results_json=RESULTS)["input"][-1]
    assert texts(user)[1:] == ["[CONTEXT]", block]
    assert texts(build("[CONTEXT]", tool_results_json=RESULTS)["input"][-1])[1:] == ["[CONTEXT]"]


@pytest.mark.parametrize("results", [None, "", "  ", "[", "[]", "{}", "null", "7"])
def test_s1_15_invalid_results_are_omitted(results: str | None) -> None:
    user = build(response_continuation_id="resp_1", tool_results_json=results)["input"][-1]
    assert len(texts(user)) == 1


def test_s1_16_objects_of_the_tools_array_are_sent() -> None:
    assert build(tools_json=json.dumps([TOOL, "x", 7, None, {"type": "web_search"}]))["tools"] == [
        TOOL,
        {"type": "web_search"},
    ]


@pytest.mark.parametrize("tools", [None, "", "[", '{"type": "function"}', "7", '"x"'])
def test_s1_17_tools_that_are_no_array_are_omitted(tools: str | None) -> None:
    assert "tools" not in build(tools_json=tools)


def test_s1_18_a_continuation_sends_no_tools() -> None:
    assert "tools" not in build(tools_json=json.dumps([TOOL]), response_continuation_id="resp_1")


@pytest.mark.parametrize("continuation", [None, "resp_1"])
def test_s1_19_a_named_tool_is_chosen_on_every_turn(continuation: str | None) -> None:
    built = build(tool_choice_name="look_up", response_continuation_id=continuation)
    assert built["tool_choice"] == {"type": "function", "name": "look_up"}
    assert "tool_choice" not in build(tool_choice_name="", response_continuation_id=continuation)


def test_s1_21_missing_context_or_request_raises() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match="context must not be None"):
        ResponsesRequestBuilder.build(nothing, AgentExecuteRequest())
    with pytest.raises(TypeError, match="request must not be None"):
        ResponsesRequestBuilder.build(CONTEXT, nothing)


def test_s1_23_system_prompt_of_the_conversation_comes_first() -> None:
    built = build(None, "<<<usage>>>", system_prompt="Ignore what was said before.")
    assert texts(built["input"][0])[0] == "You are Aptix."
    assert built["input"][0]["role"] == "system"


# Tests that the seed requires by name


def test_s1_22_initial_versus_continuation() -> None:
    initial, continued = build(), build(response_continuation_id="resp_1")
    assert [message["role"] for message in initial["input"]] == ["system", "user"]
    assert [message["role"] for message in continued["input"]] == ["user"]
    assert continued == {**initial, "previous_response_id": "resp_1", "input": initial["input"][1:]}


def test_s1_22_rag_context_inclusion() -> None:
    assert texts(build("[CONTEXT]")["input"][1]) == ["[MODE: QA]\n\n[INSTRUCTION]\nWhy?", "[CONTEXT]"]
    assert len(texts(build()["input"][1])) == 1


def test_s1_22_tool_schemas_and_tool_choice() -> None:
    built = build(tools_json=json.dumps([TOOL]), tool_choice_name="look_up")
    assert (built["tools"], built["tool_choice"]) == ([TOOL], {"type": "function", "name": "look_up"})


def test_s1_22_tool_results_block() -> None:
    user = build(tool_results_json=RESULTS, response_continuation_id="resp_1")["input"][-1]
    assert texts(user)[-1].startswith("[TOOL_RESULTS]\n\n- CallId: call_1\n")


def test_s1_3_stream_can_be_positional() -> None:
    assert build(None, None, True)["stream"] is True


def test_s1_12_null_mode_and_instruction_are_empty() -> None:
    assert texts(build(mode=None, instruction=None)["input"][1]) == ["[MODE: ]\n\n[INSTRUCTION]\n"]


@pytest.mark.parametrize("text", ["[" * 100_000, '["\ud800"]'])
def test_s1_15_s1_17_unparsable_json_is_omitted(text: str) -> None:
    assert "tools" not in build(tools_json=text)
    user = build(response_continuation_id="resp_1", tool_results_json=text)["input"][-1]
    assert len(texts(user)) == 1


# The usage metadata block


def test_s1_20_the_block_has_these_delimiters_and_trimmed_texts() -> None:
    assert build_usage_block({"look_up": "\n  Use it first. \n", "send": "Use it last."}) == (
        "<<<APTIX_SERVER_TOOL_USAGE_METADATA_BEGIN>>>\n"
        "<<<APTIX_TOOL_USAGE_BEGIN name='look_up'>>>\n"
        "Use it first.\n"
        "<<<APTIX_TOOL_USAGE_END name='look_up'>>>\n"
        "\n"
        "<<<APTIX_TOOL_USAGE_BEGIN name='send'>>>\n"
        "Use it last.\n"
        "<<<APTIX_TOOL_USAGE_END name='send'>>>\n"
        "\n"
        "<<<APTIX_SERVER_TOOL_USAGE_METADATA_END>>>"
    )


def test_tool_without_usage_text_is_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert build_usage_block({"look_up": "", "send": None}) is None
    block = build_usage_block({"look_up": "", "send": "Use it."})
    assert block is not None
    assert "look_up" not in block
    message = "the tool {} has no usage text and is not in the system prompt"
    assert caplog.messages == [message.format(name) for name in ("look_up", "send", "look_up")]


def test_no_tools_have_no_block() -> None:
    assert build_usage_block({}) is None


# The [TOOL_RESULTS] block


def test_each_field_has_a_line_and_entries_a_blank_line_between() -> None:
    results = [
        {
            "CallId": "call_1",
            "Name": "look_up",
            "IsServerTool": True,
            "WasExecuted": False,
            "ArgumentsJson": '{"q": 1}',
            "ResultJson": '{"a": [1, 2]}',
            "ErrorMessage": "It broke.",
        },
        {"callId": "call_2", "name": "send", "isServerTool": False, "resultJson": "{}"},
    ]
    assert build_tool_results(json.dumps(results)) == (
        "[TOOL_RESULTS]\n"
        "\n"
        "- CallId: call_1\n"
        "  Name: look_up\n"
        "  IsServerTool: true\n"
        "  WasExecuted: false\n"
        "  ArgumentsJson:\n"
        '    {"q": 1}\n'
        "  ResultJson:\n"
        '    {"a": [1, 2]}\n'
        "  ErrorMessage:\n"
        "    It broke.\n"
        "\n"
        "- CallId: call_2\n"
        "  Name: send\n"
        "  IsServerTool: false\n"
        "  ResultJson:\n"
        "    {}"
    )


def test_missing_fields_are_marked_and_blank_ones_omitted() -> None:
    results = [{"ArgumentsJson": "  ", "ResultJson": None}, "no object", 7]
    assert build_tool_results(json.dumps(results)) == "[TOOL_RESULTS]\n\n- CallId: (missing)\n  Name: (missing)"


def test_array_without_results_has_no_block() -> None:
    assert build_tool_results('["no object"]') is None


def test_result_that_is_no_string_is_encoded_as_json() -> None:
    block = build_tool_results('[{"CallId": "c", "Name": "n", "ResultJson": {"a": 1}}]')
    assert block == '[TOOL_RESULTS]\n\n- CallId: c\n  Name: n\n  ResultJson:\n    {"a":1}'
