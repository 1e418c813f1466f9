from typing import Any

import pytest

from antiphon.errors import InvalidRequest
from antiphon.protocol.codec import Decoded, decode_request, encode
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import (
    AllowedToolsChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    GrammarInput,
    McpChoice,
    McpTool,
    NamespaceTool,
    WebSearchPreviewTool20250311,
    has_credentials,
    hide_credentials,
)
from antiphon.protocol.unions import Unknown

F = FunctionTool("f", "d", {"type": "object"}, True)
FLAT = b'{"type":"function","name":"f","description":"d","parameters":{"type":"object"},"strict":true}'
NESTED = b'{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"},"strict":true}}'
NAMESPACE = b'{"type":"namespace","name":"n","description":"d","tools":[%b]}'


def decode_tools(raw: bytes) -> Decoded[CreateRequest]:
    return decode_request(b'{"tools":[%b]}' % raw)


@pytest.mark.parametrize(
    ("raw", "tool"),
    [
        (FLAT, F),
        (NESTED, F),
        (b'{"type":"function","function":{"name":"f"}}', FunctionTool("f")),
        (b'{"type":"function","function":{"name":"f","description":null,"strict":null}}', FunctionTool("f")),
        (NAMESPACE % NESTED, NamespaceTool("n", "d", [F])),
        (NAMESPACE % b'{"type": "acme:x"}', NamespaceTool("n", "d", [Unknown(b'{"type": "acme:x"}')])),
        (
            b'{"type":"custom","name":"c","format":{"type":"grammar","syntax":"lark","definition":"x"}}',
            CustomTool("c", format=GrammarInput("x", "lark")),
        ),
        (b'{"type":"web_search_preview_2025_03_11"}', WebSearchPreviewTool20250311()),
        (b'{"type":"acme:x", "n": 1.0}', Unknown(b'{"type":"acme:x", "n": 1.0}')),
    ],
)
def test_tool_is_decoded_in_every_form(raw: bytes, tool: Any) -> None:
    assert decode_tools(raw) == Decoded(CreateRequest(tools=[tool]))
    assert decode_tools(b"%b,%b" % (raw, FLAT)) == Decoded(CreateRequest(tools=[tool, F]))


def test_nested_function_is_encoded_flat() -> None:
    assert encode(decode_tools(NESTED).body.tools) == b"[%b]" % FLAT


def test_function_tool_is_encoded_with_all_echoed_fields() -> None:
    assert (
        encode(FunctionTool("f"))
        == b'{"type":"function","name":"f","description":null,"parameters":null,"strict":null}'
    )


def test_unknown_fields_of_nested_function_are_ignored_and_reported() -> None:
    decoded = decode_tools(b'{"type":"function","function":{"name":"f","x":1},"cache_control":{}}')
    assert decoded == Decoded(
        CreateRequest(tools=[FunctionTool("f")]), ("tools[0].function.x", "tools[0].cache_control")
    )


def test_null_function_field_of_flat_tool_is_ignored() -> None:
    decoded = decode_tools(b'{"type":"function","name":"f","function":null}')
    assert decoded == Decoded(CreateRequest(tools=[FunctionTool("f")]), ("tools[0].function",))


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"type":"function","function":{"name":1}}', "tools[0].function.name"),
        (b'{"type":"function","function":"f"}', "tools[0].function"),
        (NAMESPACE % b'{"type":"function","function":{"name":"f","strict":1}}', "tools[0].tools[0].function.strict"),
    ],
)
def test_invalid_nested_function_is_rejected_with_param_path(raw: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_tools(raw)
    assert (caught.value.param, caught.value.code) == (param, "invalid_type")


@pytest.mark.parametrize(
    ("raw", "choice"),
    [
        (b"null", None),
        (b'"none"', "none"),
        (b'"auto"', "auto"),
        (b'"required"', "required"),
        (b'{"type":"function","name":"f"}', FunctionChoice("f")),
        (b'{"type":"tool","name":"f"}', FunctionChoice("f")),
        (b'{"type":"function","function":{"name":"f"}}', FunctionChoice("f")),
        (b'{"type":"tool","function":{"name":"f"}}', FunctionChoice("f")),
        (b'{"type":"mcp","server_label":"s"}', McpChoice("s")),
        (
            b'{"type":"allowed_tools","tools":[{"type":"function","name":"f"}]}',
            AllowedToolsChoice([{"type": "function", "name": "f"}], "auto"),
        ),
        (b'{"type":"acme:x", "n":1}', Unknown(b'{"type":"acme:x", "n":1}')),
    ],
)
def test_tool_choice_is_decoded_in_every_form(raw: bytes, choice: Any) -> None:
    assert decode_request(b'{"tool_choice":%b}' % raw) == Decoded(CreateRequest(tool_choice=choice))


def test_tool_choice_is_encoded_in_api_form() -> None:
    choice = decode_request(b'{"tool_choice":{"type":"tool","function":{"name":"f"}}}').body.tool_choice
    assert encode(choice) == b'{"type":"function","name":"f"}'


def test_allowed_tools_are_encoded_with_mode() -> None:
    choice = AllowedToolsChoice([{"type": "function", "name": "f"}])
    assert encode(choice) == b'{"type":"allowed_tools","tools":[{"type":"function","name":"f"}],"mode":"auto"}'


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://ada:pass@example.org/mcp", "https://example.org/mcp"),
        ("https://ada:p@ss@example.org", "https://example.org"),
        ("https://example.org/mcp?to=ada@example.com", "https://example.org/mcp?to=ada@example.com"),
        ("https://example.org?to=ada@example.com", "https://example.org?to=ada@example.com"),
    ],
)
def test_hidden_credentials_leave_the_rest_of_a_url(url: str, shown: str) -> None:
    tool = McpTool(server_label="s", server_url=url, authorization="a", headers={"b": "c"})
    assert hide_credentials(tool) == McpTool(server_label="s", server_url=shown)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (
            b'{"type":"code_interpreter","container":{"network_policy":{"domain_secrets":["key-123456"],"type":"x"}}}',
            b'{"type":"code_interpreter","container":{"network_policy":{"type":"x"}}}',
        ),
        (
            b'{"type":"shell","environment":{"network_policy":{"domain_secrets":[{"value":"key-123456"}]}}}',
            b'{"type":"shell","environment":{"network_policy":{}}}',
        ),
        (
            NAMESPACE % b'{"type":"mcp","server_label":"s","authorization":"key-123456"}',
            NAMESPACE % b'{"type":"mcp","server_label":"s"}',
        ),
        (b'{"type":"code_interpreter","container":"cntr_1"}', b'{"type":"code_interpreter","container":"cntr_1"}'),
        (NAMESPACE % FLAT, NAMESPACE % FLAT),
    ],
)
def test_secrets_in_a_tool_are_hidden(sent: bytes, shown: bytes) -> None:
    (tool,), (expected,) = (decode_request(b'{"tools":[%b]}' % each).body.tools or () for each in (sent, shown))
    before = encode(tool)
    assert (has_credentials([tool]), encode(hide_credentials(tool))) == (True, encode(expected))
    assert encode(tool) == before
