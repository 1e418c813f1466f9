"""Translation of turns: the contract's body, the client's parameters, and the items."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ToolParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsStreaming
from pydantic import TypeAdapter

from antiphon.backends.base import Turn
from antiphon.backends.responses.request import PreviousResponse, RequestWriter, ResponsesOptions, list_ignored_params
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.content import InputImage, InputText, OutputText, ReasoningText, Refusal, SummaryText, Text
from antiphon.protocol.hosted import (
    LocalShellAction,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    WebSearchCall,
)
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

OPENAI = ResponsesOptions(base_url="https://api.openai.com/v1", api_key="sk-secret")
AZURE = ResponsesOptions(base_url="https://me.openai.azure.com/openai/v1", api_key="azure-secret")
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


def make_turn(*items: Item | Unknown, **parameters: Any) -> Turn:
    body = {"model": "gpt-5", "input": "unread", "instructions": ""} | parameters
    request = codec.decode_request(json.dumps(body).encode()).body
    return Turn(request=request, items=list(items) or [HELLO])


def write(turn: Turn, options: ResponsesOptions = OPENAI, *, name: str = "openai") -> dict[str, Any]:
    body: dict[str, Any] = json.loads(RequestWriter(name, options).write(turn).body)
    return body


# The contract


def test_s5_1_plain_request_is_exactly_the_contract() -> None:
    assert write(make_turn()) == CONTRACT


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.5}])
def test_instructions_are_omitted_if_the_client_sent_none(parameters: dict[str, Any]) -> None:
    expected = {name: value for name, value in CONTRACT.items() if name != "instructions"} | parameters
    turn = make_turn(instructions=None, **parameters)
    assert write(turn) == expected
    assert "instructions" not in json.loads(RequestWriter("up", OPENAI).write_count_request(turn))


def test_s5_2_explicit_defaults_change_nothing() -> None:
    defaults = {"tool_choice": "auto", "parallel_tool_calls": False, "stream": False, "store": True, "tools": []}
    assert write(make_turn(**defaults)) == CONTRACT


def test_s5_3_store_is_true_only_for_azure() -> None:
    assert write(make_turn())["store"] is False
    assert write(make_turn(), AZURE)["store"] is True
    assert write(make_turn(), OPENAI, name="Azure")["store"] is True


def test_s5_4_azure_gets_its_key_in_api_key_header() -> None:
    assert RequestWriter("openai", OPENAI).make_credentials() == {"Authorization": "Bearer sk-secret"}
    assert RequestWriter("azure", AZURE).make_credentials() == {"api-key": "azure-secret"}
    assert RequestWriter("local", ResponsesOptions(base_url="http://127.0.0.1:1/v1")).make_credentials() == {}


@pytest.mark.parametrize("azure", [False, True])
def test_s5_5_encrypted_reasoning_is_included_with_reasoning(*, azure: bool) -> None:
    options = AZURE if azure else OPENAI
    assert write(make_turn(), options)["include"] == []
    sent = write(make_turn(reasoning={"effort": "medium", "summary": True}), options)
    assert sent["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert sent["include"] == ["reasoning.encrypted_content"]


def test_s5_6_unset_options_are_omitted_and_set_ones_sent() -> None:
    sent = write(make_turn(reasoning={}, prompt_cache_key="k", text={"verbosity": "low"}))
    assert sent == CONTRACT | {
        "reasoning": {},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
    }


def test_s5_7_cache_key_is_the_conversation_id() -> None:
    assert write(make_turn(conversation="conv_1"))["prompt_cache_key"] == "conv_1"
    assert write(make_turn(conversation={"id": "conv_1"}))["prompt_cache_key"] == "conv_1"
    assert write(make_turn(conversation="conv_1", prompt_cache_key="k"))["prompt_cache_key"] == "k"
    assert "conversation" not in write(make_turn(conversation="conv_1"))


def test_s5_8_text_has_format_and_verbosity() -> None:
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    text = {"format": schema, "verbosity": "high"}
    assert write(make_turn(text=text))["text"] == text


def test_s5_9_verbosity_is_omitted_with_warning_for_other_models() -> None:
    request = RequestWriter("up", OPENAI).write(make_turn(model="gpt-4o", text={"verbosity": "low"}))
    assert "text" not in json.loads(request.body)
    assert request.warnings == ["text.verbosity: omitted, because 'gpt-4o' is not of the gpt-5 family"]
    assert RequestWriter("up", OPENAI).write(make_turn(text={"verbosity": "low"})).warnings == []
    verbose = make_turn(text={"verbosity": "low"}, service_tier="flex").request
    assert [list_ignored_params(verbose, model) for model in ("gpt-4o", "gpt-5")] == [["text.verbosity"], []]


def test_s5_10_item_ids_are_sent_only_to_azure() -> None:
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


def test_s5_11_headers_follow_the_contract() -> None:
    plain = {"Accept": "text/event-stream", "OpenAI-Beta": "responses=experimental"}
    assert RequestWriter("up", OPENAI).write(make_turn()).headers == plain
    session = plain | {"conversation_id": "conv_1", "session_id": "conv_1"}
    assert RequestWriter("up", OPENAI).write(make_turn(prompt_cache_key="conv_1")).headers == session
    assert RequestWriter("up", OPENAI).write(make_turn(prompt_cache_key="über\n")).headers == plain
    without_session = ResponsesOptions(base_url=OPENAI.base_url, session_headers=False)
    assert RequestWriter("up", without_session).write(make_turn(prompt_cache_key="conv_1")).headers == plain


def test_s5_13_request_is_validated_before_it_is_sent() -> None:
    with pytest.raises(InvalidRequest) as caught:
        RequestWriter("up", OPENAI).write(make_turn(HELLO, Unknown(b"{}")))
    assert caught.value.param == "input[1].type"


# Other parameters


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "function", "name": "f"}}, {"tool_choice": {"type": "function", "name": "f"}}),
        ({"parallel_tool_calls": True}, {"parallel_tool_calls": True}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"max_output_tokens": 19, "max_tool_calls": 2}, {"max_output_tokens": 19, "max_tool_calls": 2}),
        ({"max_output_tokens": 9}, {"max_output_tokens": 16}),
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
        # The engine handles these itself.
        ({"truncation": "auto", "background": True, "store": True, "previous_response_id": "resp_1"}, {}),
        ({"stream_options": {"include_obfuscation": True}}, {}),
    ],
)
def test_client_parameter_is_added_to_the_contract(parameters: dict[str, Any], sent: dict[str, Any] | None) -> None:
    assert write(make_turn(**parameters)) == CONTRACT | (parameters if sent is None else sent)


def test_client_includes_are_added() -> None:
    both = ["web_search_call.results", "reasoning.encrypted_content"]
    assert write(make_turn(include=both))["include"] == both
    sent = write(make_turn(include=both, reasoning={"effort": "low"}))
    assert sent["include"] == ["reasoning.encrypted_content", "web_search_call.results"]


def test_nested_function_tool_is_flattened() -> None:
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


def test_long_call_ids_are_shortened_in_calls_and_outputs() -> None:
    """NousResearch/hermes-agent#73538"""
    ids = ["c" * 64, "c" * 65, "d" * 200]
    items = [
        item
        for call_id in ids
        for item in (
            FunctionCall(call_id, "f", "{}"),
            FunctionCallOutput("x", call_id),
            CustomToolCallOutput(call_id, "y"),
        )
    ]
    sent = [item["call_id"] for item in write(make_turn(*items))["input"]]
    assert sent[:3] == [ids[0]] * 3
    assert len({*sent[3:6]}) == len({*sent[6:]}) == 1
    assert len({*sent}) == 3
    assert all(len(call_id) <= 64 for call_id in sent)


def test_long_call_id_of_a_shell_output_matches_its_call() -> None:
    shell = LocalShellCall("c" * 65, LocalShellAction(["ls"], {}), "lsh_1", "completed")
    call, output = write(make_turn(shell, LocalShellCallOutput("lsho_1", "x", None, "c" * 65)))["input"]
    assert output == {"type": "local_shell_call_output", "id": call["call_id"], "output": "x"}
    assert len(call["call_id"]) <= 64


def test_long_call_ids_of_a_stored_response_are_unchanged() -> None:
    """The upstream has made the first id. The second one is of a call that it gets now."""
    writer = RequestWriter("up", ResponsesOptions(base_url="http://127.0.0.1:1/v1", state="upstream"))
    stored, new = "c" * 65, "d" * 65
    later = [FunctionCallOutput("x", stored), FunctionCall(new, "f", "{}"), FunctionCallOutput("y", new)]
    turn = make_turn(HELLO, FunctionCall(stored, "f", "{}"), *later)
    first, second, third = json.loads(writer.write(turn, PreviousResponse("resp_up", later)).body)["input"]
    assert first["call_id"] == stored
    assert second["call_id"] == third["call_id"] != new


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
        # jeremychone/rust-genai#119
        (
            Message("assistant", [InputText("Hi"), Refusal("No")]),
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Hi", "annotations": []},
                    {"type": "refusal", "refusal": "No"},
                ],
            },
        ),
        (
            Message("developer", [OutputText("Hi"), InputImage(image_url="data:,")]),
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": "data:,"}],
            },
        ),
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
        # Required fields stay, and an approval still names its request.
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
def test_item_is_sent_without_local_fields(item: Any, sent: dict[str, Any]) -> None:
    assert write(make_turn(item))["input"] == [sent]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [("", "{}"), ('{"q":', r'{"arguments":"{\"q\":"}'), ("[1]", '{"arguments":"[1]"}')],
)
@pytest.mark.parametrize("options", [OPENAI, AZURE], ids=["openai", "azure"])
def test_arguments_other_than_objects_are_wrapped(arguments: str, sent: str, options: ResponsesOptions) -> None:
    call = FunctionCall("call_1", "f", arguments)
    assert write(make_turn(call), options)["input"] == [
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": sent}
    ]


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_item_of_every_type_is_sent(item: dict[str, Any]) -> None:
    decoded = codec.decode_items(json.dumps([item]).encode())
    [sent] = write(make_turn(*decoded))["input"]
    assert sent["type"] == decoded[0].type


def test_empty_reasoning_is_omitted() -> None:
    assert write(make_turn(Reasoning([], "rs_1", [ReasoningText("secret")]), HELLO)) == CONTRACT
    assert write(make_turn(Reasoning([], "rs_1"), HELLO)) == CONTRACT


def test_e_53_reasoning_text_option_sends_raw_reasoning() -> None:
    options = ResponsesOptions(base_url="http://127.0.0.1:1/v1", reasoning_text=True)
    turn = make_turn(Reasoning([], "rs_1", [ReasoningText("hm")], None, "completed"))
    assert write(turn, options)["input"] == [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    ]


def test_upstream_state_sends_id_and_new_items() -> None:
    writer = RequestWriter("up", ResponsesOptions(base_url="http://127.0.0.1:1/v1", state="upstream"))
    later = Message("user", [InputText("Hello")])
    turn = make_turn(HELLO, Message("assistant", [OutputText("Hi")]), later, truncation="auto")
    request = writer.write(turn, PreviousResponse("resp_up", [later]))
    expected = CONTRACT | {"store": True, "previous_response_id": "resp_up", "truncation": "auto"}
    assert json.loads(request.body) == expected


def test_count_request_has_only_counted_fields() -> None:
    turn = make_turn(temperature=0.5, text={"format": {"type": "text"}}, tool_choice="none")
    assert json.loads(RequestWriter("up", OPENAI).write_count_request(turn)) == {
        name: CONTRACT[name] for name in ("model", "instructions", "input", "tools", "parallel_tool_calls")
    } | {"tool_choice": "none", "text": {"format": {"type": "text"}}}


# Validation with the SDK's types. They require ids of output items, which OpenAI's server does not.
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
_params = st.fixed_dictionaries(
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


@given(st.lists(_items, min_size=1, max_size=6), _params, st.booleans())
def test_request_matches_the_sdk_types(items: list[Any], params: dict[str, Any], azure: bool) -> None:
    sent = write(make_turn(*items, **params), AZURE if azure else OPENAI)
    for item in sent["input"]:
        if item.get("role") == "assistant" or item["type"] == "reasoning":
            item |= {"id": "msg_1", "status": "completed"}
    PARAMS.validate_python(sent)
    TOOLS.validate_python(sent["tools"])  # validated apart: PARAMS does not read iterables
    assert set(sent) <= set(ResponseCreateParamsStreaming.__annotations__) | set(
        ResponseCreateParamsBase.__annotations__
    )


# The contract's own list of tests, by its names

STANDARD_URL, AZURE_URL = "https://api.openai.com/v1", "https://my-resource.openai.azure.com"
REQUIRED = {
    "model",
    "instructions",
    "input",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "store",
    "stream",
    "include",
}


def write_hello(base_url: str = STANDARD_URL, **parameters: Any) -> dict[str, Any]:
    whole = {"model": "gpt-5", "instructions": "You are a helpful assistant.", "input": "unread"} | parameters
    request = codec.decode_request(json.dumps(whole).encode()).body
    turn = Turn(request=request, items=[Message("user", [InputText("Hello")])])
    written: dict[str, Any] = json.loads(RequestWriter("up", ResponsesOptions(base_url=base_url)).write(turn).body)
    return written


def test_responses_api_request_required_fields() -> None:
    assert set(write_hello()) == REQUIRED


def test_literal_types_enforced() -> None:
    written = write_hello()
    assert (written["tool_choice"], written["parallel_tool_calls"], written["stream"]) == ("auto", False, True)


@pytest.mark.parametrize(("base_url", "store"), [(AZURE_URL, True), (STANDARD_URL, False)])
def test_azure_store_flag(base_url: str, *, store: bool) -> None:
    assert write_hello(base_url)["store"] is store


def test_include_array_reasoning() -> None:
    written = write_hello(reasoning={"effort": "medium", "summary": True})
    assert (written["include"], write_hello()["include"]) == (["reasoning.encrypted_content"], [])


def test_serialization_omits_undefined() -> None:
    optional = {"reasoning": {"effort": "medium"}, "prompt_cache_key": "conv_123", "text": {"verbosity": "medium"}}
    written = write_hello(**optional)
    assert {name: written[name] for name in optional} == optional
    assert set(written) == REQUIRED | set(optional)
    assert not set(write_hello()) & set(optional)
