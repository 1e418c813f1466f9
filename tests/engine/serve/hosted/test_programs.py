"""Programs of programmatic_tool_calling: nested calls, pauses, continuation, and programs that cannot be continued."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("py_mini_racer")
pytest.importorskip("mcp")

from antiphon.engine.serve.hosted import journal
from antiphon.errors import InvalidRequest, StoreUnavailable
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.store.memory.store import MemoryStore
from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.mcp.tool import McpHostedTool
from antiphon.upstream.addresses import OutboundRules
from support.hosted_harness import HostedHarness, make_script, make_text, run_engine, show_items
from support.hosted_sessions import make_settings
from support.mcp_wire_server import WireServer, serve_mcp
from support.program_runner import LocalPrograms

PROGRAMS = {"type": "programmatic_tool_calling"}
GET = {
    "type": "function",
    "name": "get",
    "description": "Gets a number.",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "allowed_callers": ["programmatic"],
}


def make_program(code: str, call_id: str = "call_m") -> dict[str, Any]:
    return {"tool_call": {"name": PROGRAMS["type"], "arguments": {"code": code}, "call_id": call_id}}


@asynccontextmanager
async def run_programs(*answers: Any, **policy: Any) -> AsyncIterator[HostedHarness]:
    setup = HostedSetup(settings=make_settings())
    rules = OutboundRules.parse(["127.0.0.1"])
    tools = (LocalPrograms(setup), McpHostedTool(setup))
    async with run_engine(make_script(*answers), *tools, outbound=rules, **policy) as harness:
        yield harness


def add(given: dict[str, Any]) -> str:
    return str(given["one"] + given["other"])


def make_entry(server: WireServer, **fields: Any) -> dict[str, Any]:
    entry = {"type": "mcp", "server_label": "s", "server_url": server.url, "allowed_callers": ["programmatic"]}
    return entry | {"require_approval": "never"} | fields


def show(items: Any) -> list[Any]:
    """Return items as JSON, without ids, and without the ids of calls that contain the response's."""
    shown = show_items(items)
    for item in shown:
        item.pop("call_id", None)
        item.pop("fingerprint", None)
        item.pop("caller", None)
    return shown


def answer_calls(response: Response, outputs: Sequence[Any]) -> list[dict[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "caller": call.caller, "output": output}
        for call, output in zip(calls, outputs, strict=True)
    ]


def make_get(n: int) -> dict[str, Any]:
    return {"type": "function_call", "name": "get", "arguments": f'{{"n":{n}}}', "status": "in_progress"}


def make_output(result: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "program_output", "result": result, "status": status}


SUM = """
const [a, b] = await Promise.all([tools.get({n: 1}), tools.get({n: 2})]);
text(await tools.get({n: Number(a) + Number(b)}), Math.random());
"""


async def test_program_pauses_for_the_client_and_continues_with_its_outputs() -> None:
    async with run_programs([make_program(SUM)], "Done.") as harness:
        fields: Any = {"tools": [PROGRAMS, GET]}
        first = await harness.answer("add", **fields)
        second = await harness.answer(answer_calls(first, ["10", "20"]), previous_response_id=first.id, **fields)
        sent = [*answer_calls(second, ["thirty"]), {"role": "user", "content": "and?"}]
        third = await harness.answer(sent, previous_response_id=second.id, **fields)
        begin, end = harness.turns
    program = first.output[0]
    assert show(first.output) == [{"type": "program", "code": SUM}, make_get(1), make_get(2)]
    assert [item.caller for item in first.output[1:]] == [{"type": "program", "caller_id": program.call_id}] * 2
    assert show(second.output) == [make_get(30)]
    result = third.output[0].result
    assert result.startswith("thirty 0.")
    assert show(third.output) == [make_output(result), make_text("Done.")]
    assert third.output[0].call_id == program.call_id
    (function,) = begin.request.tools  # the client's function is for programs only
    assert function.name == "programmatic_tool_calling"
    described = "- tools.get(arguments): Gets a number. Arguments: " + json.dumps(
        GET["parameters"], separators=(",", ":")
    )
    assert f"{described} Returns a string." in function.description
    assert [(item.type, getattr(item, "call_id", None)) for item in end.items] == [
        ("message", None),
        ("message", None),
        ("function_call", program.call_id),
        ("function_call_output", program.call_id),
    ]


async def test_program_continues_from_items_of_the_input_without_a_store() -> None:
    async with run_programs([make_program("text(await tools.get({n: 1}))")], "Done.") as harness:
        fields: Any = {"tools": [PROGRAMS, GET], "store": False}
        question = {"role": "user", "content": "get"}
        first = await harness.answer([question], **fields)
        history = [question, *json.loads(codec.encode(first.output)), *answer_calls(first, ["ten"])]
        second = await harness.answer(history, **fields)
        assert show(second.output) == [make_output("ten"), make_text("Done.")]
        again = await harness.answer([*history, *json.loads(codec.encode(second.output))], **fields)
        names = [item.type for item in harness.turns[-1].items]
    assert show(again.output) == [make_text("Done.")]
    assert names == ["message", "function_call", "function_call_output", "message"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"code": "text(await tools.get({n: 2}))"},
            "its code or fingerprint was changed, or it is a program of another",
        ),
        ({"fingerprint": "abc"}, "its code or fingerprint was changed, or it is a program of another server"),
    ],
)
async def test_changed_program_is_not_continued(change: dict[str, str], reason: str) -> None:
    async with run_programs([make_program("text(await tools.get({n: 1}))")], "Done.") as harness:
        first = await harness.answer("get", tools=[PROGRAMS, GET], store=False)
        program, call = json.loads(codec.encode(first.output))
        items = [program | change, call, *answer_calls(first, ["ten"])]
        second = await harness.answer(items, tools=[PROGRAMS, GET], store=False)
    output = second.output[0]
    assert (output.status, output.result.startswith(f"The program cannot be continued: {reason}")) == (
        "incomplete",
        True,
    )
    assert show(second.output)[1:] == [make_text("Done.")]


async def test_call_that_differs_from_its_record_ends_the_program() -> None:
    async with run_programs([make_program("text(await tools.get({n: 1}))")], "Done.") as harness:
        first = await harness.answer("get", tools=[PROGRAMS, GET], store=False)
        program, call = json.loads(codec.encode(first.output))
        changed = [program, call | {"arguments": '{"n":5}'}, *answer_calls(first, ["ten"])]
        second = await harness.answer(changed, tools=[PROGRAMS, GET], store=False)
        unanswered = [program, call]
        with pytest.raises(InvalidRequest, match="No tool output found"):
            await harness.answer(unanswered, tools=[PROGRAMS, GET], store=False)
    message = "The program cannot be continued: it made another call than before. No call was repeated."
    assert show(second.output)[0] == make_output(message, "incomplete")


async def test_hosted_calls_of_a_program_run_once_and_before_client_calls() -> None:
    code = """
    const [n, added] = await Promise.all([tools.get({n: 1}), tools.add({one: 1, other: 2})]);
    text(n, added, await tools.add({one: Number(added), other: 4}));
    """
    async with serve_mcp({"add": add}) as server, run_programs([make_program(code)], "Done.") as harness:
        fields: Any = {"tools": [make_entry(server), PROGRAMS, GET], "store": False}
        first = await harness.answer("add", **fields)
        items = json.loads(codec.encode(first.output))
        assert server.calls == [("add", {"one": 1, "other": 2})]
        second = await harness.answer([*items, *answer_calls(first, ["ten"])], **fields)
        calls = list(server.calls)
        without = [item for item in items if item["type"] != "mcp_call"]
        third = await harness.answer([*without, *answer_calls(first, ["ten"])], **fields)
        tools = [tool.name for tool in harness.turns[0].request.tools]
        context = [item.type for item in harness.turns[1].items]
    assert [item["type"] for item in items] == ["mcp_list_tools", "program", "mcp_call", "function_call"]
    assert calls == server.calls == [("add", {"one": 1, "other": 2}), ("add", {"one": 3, "other": 4})]
    assert [item.type for item in second.output] == ["mcp_call", "program_output", "message"]
    assert second.output[1].result == "ten 3 7"
    missing = "The program cannot be continued: calls that it has made are missing in the input. No call was repeated."
    assert [item.result for item in third.output if item.type == "program_output"] == [missing]
    assert tools == ["programmatic_tool_calling"]
    assert context == ["function_call", "function_call_output"]


@pytest.mark.parametrize(
    ("decision", "result", "executed"),
    [
        ({"approve": True}, "first 3", 1),
        ({"approve": False}, "first The user did not approve this call. It was not executed.", 0),
        (
            {"approve": False, "reason": "no"},
            "first The user did not approve this call. It was not executed. Reason: no",
            0,
        ),
    ],
)
async def test_approval_pauses_the_program(decision: dict[str, Any], result: str, executed: int) -> None:
    code = "text(await tools.get({n: 1}), await tools.add({one: 1, other: 2}))"
    async with serve_mcp({"add": add}) as server, run_programs([make_program(code)], "Done.") as harness:
        fields: Any = {"tools": [make_entry(server, require_approval="always"), PROGRAMS, GET]}
        first = await harness.answer("add", **fields)
        second = await harness.answer(answer_calls(first, ["first"]), previous_response_id=first.id, **fields)
        (request,) = second.output
        answer = {"type": "mcp_approval_response", "approval_request_id": request.id} | decision
        assert len(server.calls) == 0
        third = await harness.answer([answer], previous_response_id=second.id, **fields)
    assert (request.type, len(server.calls)) == ("mcp_approval_request", executed)
    assert [item.type for item in third.output] == ["mcp_call"] * executed + ["program_output", "message"]
    assert third.output[executed].result == result


async def test_failed_and_refused_calls_reach_the_program() -> None:
    code = "try { await tools.add({}) } catch (error) { text(error.message) } await tools.add({}); text('never')"
    async with serve_mcp({"add": add}) as server, run_programs([make_program(code)], "Done.") as harness:
        response = await harness.answer("add", tools=[make_entry(server), PROGRAMS], max_tool_calls=2)
    program, call, output, message = response.output[1:]
    assert (program.type, call.type, call.status, len(server.calls)) == ("program", "mcp_call", "failed", 1)
    refusal = "The call was not carried out: the limit of 2 tool calls is reached. Answer now, without it."
    assert (output.status, output.result) == ("incomplete", refusal)
    assert message.type == "message"


async def test_continued_program_does_not_count_again() -> None:
    code = "text(await tools.get({n: 1}), await tools.add({one: 1, other: 2}))"
    async with serve_mcp({"add": add}) as server, run_programs([make_program(code)], "Done.") as harness:
        fields: Any = {"tools": [make_entry(server), PROGRAMS, GET], "max_tool_calls": 1}
        first = await harness.answer("add", **fields)
        second = await harness.answer(answer_calls(first, ["first"]), previous_response_id=first.id, **fields)
    assert [item.type for item in second.output] == ["mcp_call", "program_output", "message"]
    assert second.output[1].result == "first 3"


class InterruptingStore(MemoryStore):
    """A store that cannot store the steps of a hosted tool once: those after the step of number `last`."""

    last = 7

    async def append_hosted_steps(
        self, project: str, response_id: str, first: int, steps: Sequence[bytes], *, owner: str
    ) -> bool:
        if first > self.last:
            self.last = 1000
            raise StoreUnavailable("no space")
        return await super().append_hosted_steps(project, response_id, first, steps, owner=owner)


async def test_calls_of_a_finished_program_count_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SAVE_TIMEOUT_SECONDS", 0.0)  # so that the attempt is repeated
    code = "text(await tools.add({one: 1, other: 2}), await tools.add({one: 3, other: 4}))"
    again = [make_program("text(await tools.add({one: 5, other: 6}))")]
    policy: Any = {"store": InterruptingStore(), "background_lease_seconds": 0.1}
    async with (
        serve_mcp({"add": add}) as server,
        run_programs([make_program(code)], again, again, "Done.", **policy) as harness,
    ):
        fields: Any = {"tools": [make_entry(server), PROGRAMS], "max_tool_calls": 4}
        run = await harness.ask("add", background=True, **fields)
        async for _ in run.events():
            pass
        response = await harness.engine.retrieve("default", run.response.id)
    results = [item.result for item in response.output if item.type == "program_output"]
    refusal = "The call was not carried out: the limit of 4 tool calls is reached. Answer now, without it."
    assert (response.status, results, len(server.calls)) == ("completed", ["3 7", refusal], 2)
    assert policy["store"].last == 1000


async def test_client_tools_of_all_kinds_are_called_with_their_own_items() -> None:
    code = """
    const called = [tools.note('abc'), tools.shell({commands: ['ls']}), tools.lib__find({q: 1}), tools.typed({})];
    called.push(tools.apply_patch({type: 'delete_file', path: 'a'}), tools.apply_patch({path: 'b'}));
    const settled = await Promise.allSettled(called);
    text(settled.map((each) => each.value ?? each.reason.message));
    """
    both = ["direct", "programmatic"]
    find = {"type": "function", "name": "find", "parameters": {}, "allowed_callers": both}
    tools = [
        {"type": "custom", "name": "note", "allowed_callers": both},
        {"type": "shell", "allowed_callers": both},
        {"type": "apply_patch", "allowed_callers": ["programmatic"]},
        {"type": "namespace", "name": "lib", "description": "d", "tools": [find]},
        GET | {"name": "typed", "output_schema": {"type": "object"}},
        PROGRAMS,
    ]
    async with run_programs([make_program(code)], "Done.") as harness:
        first = await harness.answer("go", tools=tools)
        names = [tool.name for tool in harness.turns[0].request.tools]
        kinds = [item.type for item in first.output]
        _, note, shell, found, typed, patch = first.output
        outputs: list[Any] = [
            {"type": "custom_tool_call_output", "call_id": note.call_id, "output": "noted"},
            {
                "type": "shell_call_output",
                "call_id": shell.call_id,
                "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
            },
            {"type": "function_call_output", "call_id": found.call_id, "output": [{"type": "input_text", "text": "f"}]},
            {"type": "function_call_output", "call_id": typed.call_id, "output": '{"k": [1]}'},
            {"type": "apply_patch_call_output", "call_id": patch.call_id, "status": "completed"},
        ]
        second = await harness.answer(outputs, tools=tools, previous_response_id=first.id)
    assert kinds == ["program", "custom_tool_call", "shell_call", "function_call", "function_call", "apply_patch_call"]
    assert names == ["note", "shell", "lib__find", "programmatic_tool_calling"]
    assert (found.name, found.namespace) == ("find", "lib")
    assert {item.status for item in first.output[1:]} == {"in_progress"}
    assert json.loads(second.output[0].result) == [
        "noted",
        [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        "f",
        {"k": [1]},
        {"status": "completed", "output": None},
        "The arguments of tools.apply_patch are invalid: Object missing required field `type`",
    ]


async def test_second_program_of_an_answer_is_refused_while_the_first_waits() -> None:
    answer = [make_program("text(await tools.get({n: 1}))"), make_program("text('second')", "call_n")]
    async with run_programs(answer, "Done.") as harness:
        first = await harness.answer("go", tools=[PROGRAMS, GET])
        second = await harness.answer(
            answer_calls(first, ["ten"]), tools=[PROGRAMS, GET], previous_response_id=first.id
        )
        context = [item.type for item in harness.turns[-1].items]
    assert [item.type for item in first.output] == ["program", "function_call", "program", "program_output"]
    waits = "Another program waits for results. Run this one again when it has ended."
    assert show(first.output)[-1] == make_output(waits, "incomplete")
    assert show(second.output) == [make_output("ten"), make_text("Done.")]
    assert context == ["message", *["function_call", "function_call_output"] * 2]


async def test_program_without_its_tool_in_the_next_request_has_no_result() -> None:
    async with run_programs([make_program("text(await tools.get({n: 1}))")], "Done.") as harness:
        first = await harness.answer("go", tools=[PROGRAMS, GET])
        plain = [GET | {"allowed_callers": None}]
        second = await harness.answer(answer_calls(first, ["ten"]), tools=plain, previous_response_id=first.id)
        _, called, output = harness.turns[-1].items
        third = await harness.answer("more", tools=[PROGRAMS, GET], previous_response_id=second.id)
    assert show(second.output) == show(third.output) == [make_text("Done.")]
    assert (called.name, output.output) == (
        "programmatic_tool_calling",
        "The program was not continued, so it has no result.",
    )


async def test_arguments_without_code_and_broken_code_reach_the_model() -> None:
    broken = {"tool_call": {"name": PROGRAMS["type"], "arguments": {"program": 1}, "call_id": "call_1"}}
    async with run_programs([broken], [make_program("let x = ;")], "Done.") as harness:
        response = await harness.answer("go", tools=[PROGRAMS, GET])
    texts = [(item.status, item.result) for item in response.output if item.type == "program_output"]
    example = 'The arguments must be a JSON object with the code as a string: {"code": "text(1)"}.'
    assert texts == [("incomplete", example), ("incomplete", "SyntaxError: Unexpected token ';'")]


async def test_hosted_tool_for_programs_only_is_refused_to_the_model() -> None:
    direct = {"tool_call": {"name": "add", "arguments": {}, "call_id": "call_1"}}
    async with serve_mcp({"add": lambda _: "1"}) as server, run_programs([direct], "Done.") as harness:
        response = await harness.answer("go", tools=[make_entry(server), PROGRAMS])
        refused = harness.turns[-1].items[-1]
    assert server.calls == []
    assert [item.type for item in response.output] == ["mcp_list_tools", "message"]
    reason = "The call was not carried out: only a program can call this tool (programmatic_tool_calling)."
    assert refused.output == reason


async def test_tool_for_programs_needs_the_tool_for_programs() -> None:
    async with run_programs("Done.") as harness:
        with pytest.raises(InvalidRequest) as raised:
            await harness.answer("go", tools=[{"type": "function", "name": "f", "parameters": {}}, GET])
        with pytest.raises(InvalidRequest) as empty:
            await harness.answer("go", tools=[PROGRAMS, GET | {"allowed_callers": []}])
    assert (raised.value.param, raised.value.code) == ("tools[1].allowed_callers", "invalid_value")
    assert empty.value.param == "tools[1].allowed_callers"


async def test_choice_may_allow_an_mcp_tool_that_is_for_programs_only() -> None:
    async with serve_mcp({"add": add}) as server, run_programs("Done.") as harness:
        named = {"type": "mcp", "server_label": "s", "name": "add"}
        fields: Any = {"tools": [PROGRAMS, make_entry(server)]}
        fields["tool_choice"] = {"type": "allowed_tools", "mode": "auto", "tools": [PROGRAMS, named]}
        assert (await harness.answer("go", **fields)).output_text == "Done."
        named["name"] = "absent"
        with pytest.raises(InvalidRequest, match=r"^The MCP server 's' offers no tool 'absent'\.$") as raised:
            await harness.ask("go", **fields)
    assert raised.value.param == "tool_choice.tools[1].name"
