"""From a turn to the request: the contract, and what a client may wish for on top of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ToolParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsStreaming
from pydantic import TypeAdapter

from antiphon.backends.base import Turn
from antiphon.backends.responses.backend import Options
from antiphon.backends.responses.request import Continuation, Writer, list_ignored
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.content import InputImage, InputText, OutputText, ReasoningText, SummaryText, Text
from antiphon.protocol.hosted import LocalShellCallOutput, McpApprovalRequest, McpApprovalResponse, WebSearchCall
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from antiphon.protocol.unions import Unknown
from behaviour.item_samples import ITEMS

OPENAI = Options(base_url="https://api.openai.com/v1", api_key="sk-secret")
AZURE = Options(base_url="https://me.openai.azure.com/openai/v1", api_key="azure-secret")
HELLO = Message("user", [InputText("Hello")], "msg_1", "completed")
CONTRACT: dict[str, Any] = {
    "model": "gpt-5",
    "instructions": "",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "store": False,
    "stream": True,
    "include": [],
}


def make_turn(*items: Item | Unknown, **asked: Any) -> Turn:
    request = codec.decode_request(json.dumps({"model": "gpt-5", "input": "unread"} | asked).encode()).request
    return Turn(request=request, items=list(items) or [HELLO])


def write(turn: Turn, options: Options = OPENAI, *, name: str = "openai") -> dict[str, Any]:
    body: dict[str, Any] = json.loads(Writer(name, options).write(turn).body)
    return body


# The contract


def test_s5_1_a_plain_request_is_the_contract_and_nothing_else() -> None:
    assert write(make_turn()) == CONTRACT


def test_s5_2_a_default_that_a_client_spells_out_changes_nothing() -> None:
    spelt = {"tool_choice": "auto", "parallel_tool_calls": False, "stream": False, "store": True, "tools": []}
    assert write(make_turn(**spelt)) == CONTRACT


def test_s5_3_only_azure_is_asked_to_store() -> None:
    assert write(make_turn())["store"] is False
    assert write(make_turn(), AZURE)["store"] is True
    assert write(make_turn(), OPENAI, name="Azure")["store"] is True


def test_s5_4_azure_gets_its_key_in_a_header_of_its_own() -> None:
    assert Writer("openai", OPENAI).credentials() == {"Authorization": "Bearer sk-secret"}
    assert Writer("azure", AZURE).credentials() == {"api-key": "azure-secret"}
    assert Writer("local", Options(base_url="http://127.0.0.1:1/v1")).credentials() == {}


@pytest.mark.parametrize("azure", [False, True])
def test_s5_5_encrypted_reasoning_is_asked_for_if_there_is_reasoning(*, azure: bool) -> None:
    options = AZURE if azure else OPENAI
    assert write(make_turn(), options)["include"] == []
    asked = write(make_turn(reasoning={"effort": "medium", "summary": True}), options)
    assert asked["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert asked["include"] == ["reasoning.encrypted_content"]


def test_s5_6_unset_options_are_left_out_and_set_ones_are_there() -> None:
    asked = write(make_turn(reasoning={}, prompt_cache_key="k", text={"verbosity": "low"}))
    assert asked == CONTRACT | {
        "reasoning": {},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
    }


def test_s5_7_the_cache_key_is_the_conversation() -> None:
    assert write(make_turn(conversation="conv_1"))["prompt_cache_key"] == "conv_1"
    assert write(make_turn(conversation={"id": "conv_1"}))["prompt_cache_key"] == "conv_1"
    assert write(make_turn(conversation="conv_1", prompt_cache_key="k"))["prompt_cache_key"] == "k"
    assert "conversation" not in write(make_turn(conversation="conv_1"))


def test_s5_8_text_holds_the_format_and_the_verbosity() -> None:
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    asked = {"format": schema, "verbosity": "high"}
    assert write(make_turn(text=asked))["text"] == asked


def test_s5_9_a_verbosity_is_left_out_with_a_warning_for_other_families() -> None:
    question = Writer("up", OPENAI).write(make_turn(model="gpt-4o", text={"verbosity": "low"}))
    assert "text" not in json.loads(question.body)
    assert question.warnings == ["text.verbosity: left out, since 'gpt-4o' is not of the gpt-5 family"]
    assert Writer("up", OPENAI).write(make_turn(text={"verbosity": "low"})).warnings == []
    asked = make_turn(text={"verbosity": "low"}, service_tier="flex").request
    assert [list_ignored(asked, model) for model in ("gpt-4o", "gpt-5")] == [["text.verbosity"], []]


def test_s5_10_only_azure_gets_the_ids_of_items() -> None:
    items = (
        HELLO,
        Reasoning([SummaryText("s")], "rs_1", None, "opaque", "completed"),
        FunctionCall("call_1", "f", "{}", "fc_1", "completed", created_by="me"),
        FunctionCallOutput("7", "call_1", "fco_1", "completed"),
    )
    bare = [
        CONTRACT["input"][0],
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "opaque"},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "7", "call_id": "call_1"},
    ]
    assert write(make_turn(*items))["input"] == bare
    ids = ("msg_1", "rs_1", "fc_1", "fco_1")
    assert write(make_turn(*items), AZURE)["input"] == [
        each | {"id": name} for each, name in zip(bare, ids, strict=True)
    ]


def test_s5_11_the_headers_are_those_of_the_contract() -> None:
    plain = {"Accept": "text/event-stream", "OpenAI-Beta": "responses=experimental"}
    assert Writer("up", OPENAI).write(make_turn()).headers == plain
    session = plain | {"conversation_id": "conv_1", "session_id": "conv_1"}
    assert Writer("up", OPENAI).write(make_turn(prompt_cache_key="conv_1")).headers == session
    assert Writer("up", OPENAI).write(make_turn(prompt_cache_key="über\n")).headers == plain
    quiet = Options(base_url=OPENAI.base_url, session_headers=False)
    assert Writer("up", quiet).write(make_turn(prompt_cache_key="conv_1")).headers == plain


def test_s5_13_a_request_is_checked_before_it_is_sent() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Writer("up", OPENAI).write(make_turn(HELLO, Unknown(b"{}")))
    assert caught.value.param == "input[1].type"


# Wishes


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "function", "name": "f"}}, {"tool_choice": {"type": "function", "name": "f"}}),
        ({"parallel_tool_calls": True}, {"parallel_tool_calls": True}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"max_output_tokens": 9, "max_tool_calls": 2}, {"max_output_tokens": 9, "max_tool_calls": 2}),
        ({"metadata": {"a": "b"}}, {"metadata": {"a": "b"}}),
        ({"metadata": {}, "presence_penalty": 0, "frequency_penalty": 0}, {}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, None),
        ({"service_tier": "flex", "user": "u"}, {"service_tier": "flex", "user": "u"}),
        ({"safety_identifier": "s", "prompt_cache_retention": "24h"}, None),
        ({"client_metadata": {"x": "y"}}, None),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"tools": [{"type": "acme", "n": 1.5}]}, None),
        ({"instructions": "Be brief."}, None),
        # What the engine does itself is not asked for twice.
        ({"truncation": "auto", "background": True, "store": True, "previous_response_id": "resp_1"}, {}),
        ({"stream_options": {"include_obfuscation": True}}, {}),
    ],
)
def test_a_wish_goes_on_top_of_the_contract(asked: dict[str, Any], sent: dict[str, Any] | None) -> None:
    assert write(make_turn(**asked)) == CONTRACT | (asked if sent is None else sent)


def test_more_is_included_than_the_contract_asks_for() -> None:
    both = ["web_search_call.results", "reasoning.encrypted_content"]
    assert write(make_turn(include=both))["include"] == both
    asked = write(make_turn(include=both, reasoning={"effort": "low"}))
    assert asked["include"] == ["reasoning.encrypted_content", "web_search_call.results"]


def test_a_nested_function_is_sent_flat() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    [sent] = write(make_turn(tools=[tool]))["tools"]
    assert sent == {
        "type": "function",
        "name": "f",
        "description": None,
        "parameters": {"type": "object"},
        "strict": None,
    }


# Items


@pytest.mark.parametrize(
    ("item", "sent"),
    [
        (
            Message("assistant", [OutputText("Hi"), Text("there")], "msg_1", "completed", "final_answer"),
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Hi", "annotations": []},
                    {"type": "output_text", "text": "there", "annotations": []},
                ],
                "phase": "final_answer",
            },
        ),
        (
            Message("user", [Text("Hi")]),
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ),
        (Message("user", "Hi"), {"type": "message", "role": "user", "content": "Hi"}),
        (
            FunctionCallOutput([InputText("a"), Text("b")], "call_1"),
            {"type": "function_call_output", "output": "ab", "call_id": "call_1"},
        ),
        (
            FunctionCall("call_1", "f", '{ "q" : 1.0 }', namespace="n"),
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{ "q" : 1.0 }', "namespace": "n"},
        ),
        (
            CustomToolCallOutput("call_1", [Text("a"), InputImage(image_url="data:,")]),
            {
                "type": "custom_tool_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}],
            },
        ),
        (
            Reasoning([], "rs_1", [ReasoningText("secret")], "opaque"),
            {"type": "reasoning", "summary": [], "encrypted_content": "opaque"},
        ),
        # What the API asks for stays, and an approval still names its request.
        (
            WebSearchCall("ws_1", {"type": "search"}, "completed"),
            {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}, "status": "completed"},
        ),
        (
            McpApprovalRequest("mcpr_1", "{}", "f", "s"),
            {"type": "mcp_approval_request", "id": "mcpr_1", "arguments": "{}", "name": "f", "server_label": "s"},
        ),
        (
            McpApprovalResponse("mcpr_1", approve=True, id="x"),
            {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
        ),
        (
            LocalShellCallOutput(id="lsh_1", output="out", status="completed"),
            {"type": "local_shell_call_output", "output": "out", "id": "lsh_1"},
        ),
        (
            LocalShellCallOutput("lsho_1", "out", "completed", "call_1"),
            {"type": "local_shell_call_output", "output": "out", "id": "call_1"},
        ),
        (Unknown(b'{"type":"acme","id":"a_1","n":1.50}'), {"type": "acme", "id": "a_1", "n": 1.5}),
    ],
)
def test_an_item_goes_without_what_is_ours_alone(item: Any, sent: dict[str, Any]) -> None:
    assert write(make_turn(item))["input"] == [sent]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [("", "{}"), ('{"q":', r'{"arguments":"{\"q\":"}'), ("[1]", '{"arguments":"[1]"}')],
)
@pytest.mark.parametrize("options", [OPENAI, AZURE], ids=["openai", "azure"])
def test_a_call_whose_arguments_are_no_object_is_sent_with_them_in_one(
    arguments: str, sent: str, options: Options
) -> None:
    call = FunctionCall("call_1", "f", arguments)
    assert write(make_turn(call), options)["input"] == [
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": sent}
    ]


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_an_item_of_every_type_is_sent(item: dict[str, Any]) -> None:
    kept = codec.decode_items(json.dumps([item]).encode())
    [sent] = write(make_turn(*kept))["input"]
    assert sent["type"] == kept[0].type


def test_reasoning_that_says_nothing_is_left_out() -> None:
    assert write(make_turn(Reasoning([], "rs_1", [ReasoningText("secret")]), HELLO)) == CONTRACT
    assert write(make_turn(Reasoning([], "rs_1"), HELLO)) == CONTRACT


def test_e_53_raw_reasoning_goes_back_to_a_server_that_wants_it() -> None:
    options = Options(base_url="http://127.0.0.1:1/v1", reasoning_text=True)
    turn = make_turn(Reasoning([], "rs_1", [ReasoningText("hm")], None, "completed"))
    assert write(turn, options)["input"] == [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    ]


def test_state_that_is_upstream_is_continued_with_what_is_new() -> None:
    writer = Writer("up", Options(base_url="http://127.0.0.1:1/v1", state="upstream"))
    later = Message("user", [InputText("Hello")])
    turn = make_turn(HELLO, Message("assistant", [OutputText("Hi")]), later, truncation="auto")
    question = writer.write(turn, Continuation("resp_up", [later]))
    asked = CONTRACT | {"store": True, "previous_response_id": "resp_up", "truncation": "auto"}
    assert json.loads(question.body) == asked


def test_tokens_are_counted_of_what_the_model_reads() -> None:
    turn = make_turn(temperature=0.5, text={"format": {"type": "text"}}, tool_choice="none")
    assert json.loads(Writer("up", OPENAI).write_count(turn)) == {
        name: CONTRACT[name] for name in ("model", "instructions", "input", "tools", "parallel_tool_calls")
    } | {"tool_choice": "none", "text": {"format": {"type": "text"}}}


# The SDK's own types are the judge. They ask for the ids of output items, which OpenAI's server does not.
PARAMS: TypeAdapter[Any] = TypeAdapter(ResponseCreateParamsStreaming)
TOOLS: TypeAdapter[Any] = TypeAdapter(list[ToolParam])
_texts = st.text(max_size=8)
_items = st.one_of(
    st.builds(lambda text: Message("user", [InputText(text)], "msg_1", "completed"), _texts),
    st.builds(lambda text: Message("developer", text), _texts),
    st.builds(lambda text: Message("assistant", [OutputText(text)], "msg_2", "completed"), _texts),
    st.builds(lambda text: FunctionCall("call_1", "f", text, "fc_1", "completed"), _texts),
    st.builds(lambda text: FunctionCallOutput([InputText(text)], "call_1", "fco_1", "completed"), _texts),
    st.builds(lambda text: CustomToolCall("call_2", "g", text, "ctc_1", "completed"), _texts),
    st.builds(lambda text: CustomToolCallOutput("call_2", [Text(text), InputImage("auto", None, "data:,")]), _texts),
    st.builds(lambda text: Reasoning([SummaryText(text)], "rs_1", [ReasoningText(text)], "opaque"), _texts),
    st.just(WebSearchCall("ws_1", {"type": "search", "query": "q"}, "completed")),
)
_wishes = st.fixed_dictionaries(
    {},
    optional={
        "reasoning": st.just({"effort": "low", "summary": True}),
        "text": st.just({"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"}),
        "tools": st.just([{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}, {"type": "web_search"}]),
        "tool_choice": st.sampled_from(["required", "none", {"type": "function", "name": "f"}]),
        "metadata": st.just({"a": "b"}),
        "temperature": st.just(0.5),
        "prompt_cache_key": st.just("k"),
        "include": st.just(["web_search_call.results"]),
        "max_output_tokens": st.just(16),
        "service_tier": st.just("flex"),
    },
)


@given(st.lists(_items, min_size=1, max_size=6), _wishes, st.booleans())
def test_what_is_sent_is_what_the_sdk_would_send(items: list[Any], wishes: dict[str, Any], azure: bool) -> None:
    sent = write(make_turn(*items, **wishes), AZURE if azure else OPENAI)
    for item in sent["input"]:
        if item.get("role") == "assistant" or item["type"] == "reasoning":
            item |= {"id": "msg_1", "status": "completed"}
    PARAMS.validate_python(sent)
    TOOLS.validate_python(sent["tools"])  # an iterable, which the whole does not look into
    assert set(sent) <= set(ResponseCreateParamsStreaming.__annotations__) | set(
        ResponseCreateParamsBase.__annotations__
    )
