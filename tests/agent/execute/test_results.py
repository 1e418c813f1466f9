"""The `[TOOL_RESULTS]` text, byte for byte."""

import json

from antiphon.agent.execute.builder import build_tool_results


def test_every_field_has_its_line_and_entries_are_divided_by_a_blank_one() -> None:
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


def test_what_is_missing_says_so_and_what_is_blank_has_no_line() -> None:
    results = [{"ArgumentsJson": "  ", "ResultJson": None}, "no object", 7]
    assert build_tool_results(json.dumps(results)) == "[TOOL_RESULTS]\n\n- CallId: (missing)\n  Name: (missing)"


def test_an_array_without_a_result_is_no_block() -> None:
    assert build_tool_results('["no object"]') is None


def test_a_result_that_is_json_and_not_text_is_written_as_json() -> None:
    block = build_tool_results('[{"CallId": "c", "Name": "n", "ResultJson": {"a": 1}}]')
    assert block == '[TOOL_RESULTS]\n\n- CallId: c\n  Name: n\n  ResultJson:\n    {"a":1}'
