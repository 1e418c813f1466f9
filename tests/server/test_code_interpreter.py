"""The code interpreter over HTTP, with the official client and real code in the sandbox."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCodeInterpreterToolCall
from openai.types.responses.response_output_text import AnnotationContainerFileCitation

from support.code_sandbox import TOOL, call_code, require_sandbox, serve_code
from support.live_server import LiveServer

require_sandbox()

OUTPUTS: Any = ["code_interpreter_call.outputs"]
WRITE = "open('out.csv', 'w').write('a,b')\n40 + 2"
ANSWER = "See [the file](sandbox:/mnt/data/out.csv)."
PIECES = ['{"code": "open(', "'out.csv', 'w').write('a,b')\\n", '40 + 2"}']


def make_rule(user: str, *calls: Any, answer: str = "Done.") -> list[dict[str, Any]]:
    return [
        {"user": user, "last_item": "function_call_output", "answers": [answer]},
        {"user": user, "answers": [list(calls)]},
    ]


SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        *make_rule("write", {"tool_call": {"name": "code_interpreter", "arguments": PIECES}}, answer=ANSWER),
        *make_rule("read", call_code("for name in ('notes.txt', 'sent.txt'):\n    print(open(name).read())")),
        *make_rule("set", call_code("value = 7")),
        *make_rule("get", call_code("value")),
        *make_rule("fail", call_code("1 / 0")),
        *make_rule("endless", call_code("while True: pass")),
        *make_rule("no code", {"tool_call": {"name": "code_interpreter", "arguments": "print(1)"}}),
        *make_rule("list", call_code("import os\nsorted(os.listdir())")),
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    running = serve_code(SCRIPT, call_seconds=3)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def container(client: openai.OpenAI) -> str:
    """A container that several tests share, because the start of an interpreter takes time."""
    return client.containers.create(name="shared").id


def run(client: openai.OpenAI, text: Any, container: Any, **fields: Any) -> ResponseCodeInterpreterToolCall:
    """Return the call of a response that has one call and a message."""
    tool: Any = {"type": "code_interpreter", "container": container}
    response = client.responses.create(model="scripted", input=text, tools=[tool], include=OUTPUTS, **fields)
    call, message = response.output
    assert (response.status, message.type) == ("completed", "message")
    assert isinstance(call, ResponseCodeInterpreterToolCall)
    return call


def read_logs(call: ResponseCodeInterpreterToolCall) -> str:
    assert call.outputs is not None
    return "".join(output.logs for output in call.outputs if output.type == "logs")


def test_stream_has_the_code_as_it_is_written_and_cites_files(client: openai.OpenAI) -> None:
    tool: Any = TOOL
    with client.responses.stream(model="scripted", input="write", tools=[tool], include=OUTPUTS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    prefix = "response.code_interpreter_call"
    assert [event.type for event in events if getattr(event, "output_index", None) == 0] == [
        "response.output_item.added",
        f"{prefix}.in_progress",
        *[f"{prefix}_code.delta"] * 3,
        f"{prefix}_code.done",
        f"{prefix}.interpreting",
        f"{prefix}.completed",
        "response.output_item.done",
    ]
    deltas = [event.delta for event in events if event.type == f"{prefix}_code.delta"]
    assert deltas == ["open(", "'out.csv', 'w').write('a,b')\n", "40 + 2"]
    call, message = response.output
    assert isinstance(call, ResponseCodeInterpreterToolCall)
    assert call.model_dump() == {
        "id": call.id,
        "type": "code_interpreter_call",
        "status": "completed",
        "code": WRITE,
        "container_id": call.container_id,
        "outputs": [{"type": "logs", "logs": "42\n"}],
    }
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    (citation,) = part.annotations
    assert isinstance(citation, AnnotationContainerFileCitation)
    assert (citation.container_id, citation.filename) == (call.container_id, "out.csv")
    assert part.text[citation.start_index : citation.end_index] == "sandbox:/mnt/data/out.csv"
    file = client.containers.files.retrieve(citation.file_id, container_id=call.container_id)
    assert (file.path, file.source, file.bytes) == ("/mnt/data/out.csv", "assistant", 3)
    content = client.containers.files.content.retrieve(citation.file_id, container_id=call.container_id)
    assert content.read() == b"a,b"


def test_outputs_are_shown_only_if_they_are_included(client: openai.OpenAI, container: str) -> None:
    tool: Any = {"type": "code_interpreter", "container": container}
    response = client.responses.create(model="scripted", input="set", tools=[tool])
    call = response.output[0].model_dump()
    assert (call["outputs"], call["code"]) == (None, "value = 7")
    shown = client.responses.retrieve(response.id, include=OUTPUTS).output[0].model_dump()
    assert shown["outputs"] == []


def test_variables_live_in_the_container(client: openai.OpenAI, container: str) -> None:
    run(client, "set", container)
    assert read_logs(run(client, "get", container)) == "7\n"


def test_auto_uses_the_container_of_the_earlier_response(client: openai.OpenAI, container: str) -> None:
    tool: Any = {"type": "code_interpreter", "container": container}
    first = client.responses.create(model="scripted", input="set", tools=[tool])
    call = run(client, "get", {"type": "auto"}, previous_response_id=first.id)
    assert (call.container_id, read_logs(call)) == (container, "7\n")


def test_exception_is_a_completed_call(client: openai.OpenAI, container: str) -> None:
    call = run(client, "fail", container)
    assert call.status == "completed"
    assert read_logs(call).endswith("ZeroDivisionError: division by zero\n")


def test_arguments_without_code_fail_the_call(client: openai.OpenAI, container: str) -> None:
    call = run(client, "no code", container)
    assert (call.status, call.code) == ("failed", "")
    assert "must be a JSON object" in read_logs(call)


def test_endless_code_fails_the_call_and_the_container_goes_on(client: openai.OpenAI, container: str) -> None:
    run(client, "set", container)
    call = run(client, "endless", container)
    assert call.status == "failed"
    assert "longer than the time limit" in read_logs(call)
    assert "are lost" in read_logs(call)
    after = run(client, "get", container)
    assert (after.status, "NameError" in read_logs(after)) == ("completed", True)


def test_files_of_the_tool_and_the_input_are_copied(client: openai.OpenAI) -> None:
    named = client.files.create(file=("notes.txt", b"from a file"), purpose="user_data")
    sent = client.files.create(file=("sent.txt", b"from the input"), purpose="user_data")
    content = [{"type": "input_text", "text": "read"}, {"type": "input_file", "file_id": sent.id}]
    message: Any = [{"role": "user", "content": content}]
    call = run(client, message, {"type": "auto", "file_ids": [named.id]})
    assert read_logs(call) == "from a file\nfrom the input\n"
    files = client.containers.files.list(call.container_id, order="asc")
    assert [(file.path, file.source) for file in files] == [
        ("/mnt/data/notes.txt", "user"),
        ("/mnt/data/sent.txt", "user"),
    ]


@pytest.mark.parametrize(
    ("container", "refusal"),
    [
        ("cntr_unknown", (404, "tools[0].container", "not_found")),
        ({"type": "manual"}, (400, "tools[0].container.type", "invalid_value")),
        ({"type": "auto", "file_ids": "x"}, (400, "tools[0].container.file_ids", "invalid_type")),
        ({"type": "auto", "file_ids": ["file-unknown"]}, (404, "tools[0].container.file_ids[0]", None)),
        ({"type": "auto", "memory_limit": "64g"}, (400, "tools[0].container.memory_limit", "invalid_value")),
        (
            {"type": "auto", "network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]}},
            (400, "tools[0].container.network_policy", "unsupported_parameter"),
        ),
    ],
)
def test_invalid_container_is_refused_before_the_response(
    client: openai.OpenAI, container: Any, refusal: tuple[int, str, str | None]
) -> None:
    tool: Any = {"type": "code_interpreter", "container": container}
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(model="scripted", input="set", tools=[tool])
    error = refused.value
    assert (error.status_code, error.param, error.code) == refusal


def test_unused_tool_creates_no_container(client: openai.OpenAI) -> None:
    before = {container.id for container in client.containers.list(limit=100)}
    tool: Any = TOOL
    response = client.responses.create(model="scripted", input="nothing to run", tools=[tool])
    assert [item.type for item in response.output] == ["message"]
    assert {container.id for container in client.containers.list(limit=100)} == before
