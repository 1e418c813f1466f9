"""Elicitation and sampling: requests of an MCP server that functions of the program answer."""

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon import Agent, McpElicitation, McpSampling, McpServer
from antiphon.testing.scripted import ScriptedTransport
from antiphon.tools.base import ToolContext

pytest.importorskip("mcp")

PROGRAM = Path(__file__).parents[1] / "support" / "mcp_asking_server.py"
QUESTION = {"type": "object", "properties": {"name": {"type": "string"}}}


def start(**options: Any) -> McpServer:
    return McpServer.stdio(sys.executable, [str(PROGRAM)], **options)


async def ask(server: McpServer, method: str) -> Any:
    """Let the server send a request, and return the result or the error that it gets."""
    (tool,) = server.tools
    context = ToolContext(run_id="run", call_id="call", idempotency_key="key")
    result = await tool.invoke(json.dumps({"method": method}), context)
    return msgspec.json.decode(str(result.output))


async def test_question_of_the_server_is_answered_or_declined() -> None:
    answers: list[Any] = [{"name": "Ada"}, None, KeyError("secret")]
    questions: list[McpElicitation] = []
    threads: set[threading.Thread] = set()

    def answer(question: McpElicitation) -> Any:
        questions.append(question)
        threads.add(threading.current_thread())
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    async with start(on_elicitation=answer) as server:
        assert await ask(server, "elicitation/create") == {"action": "accept", "content": {"name": "Ada"}}
        assert await ask(server, "elicitation/create") == {"action": "decline"}
        # The message of an exception may have secrets, and the server may be of somebody else.
        assert await ask(server, "elicitation/create") == {"code": -32603, "message": "The client cannot answer."}
        # Sampling is still off.
        assert (await ask(server, "sampling/createMessage"))["message"] == "Sampling not supported"
    # The event loop goes on while a person is asked.
    assert threading.current_thread() not in threads
    assert questions[0] == McpElicitation(server=f"'{sys.executable}'", message="Your name?", schema=QUESTION)


async def test_request_for_an_answer_is_given_to_a_function() -> None:
    requests: list[McpSampling] = []
    answers: list[str | None] = ["Hello!", None]

    async def sample(request: McpSampling) -> str | None:
        await asyncio.sleep(0)
        requests.append(request)
        return answers.pop(0)

    async with start(on_sampling=sample) as server:
        answered = await ask(server, "sampling/createMessage")
        refused = await ask(server, "sampling/createMessage")
    assert (answered["role"], answered["content"]) == ("assistant", {"type": "text", "text": "Hello!"})
    assert refused == {"code": -1, "message": "The request was refused."}
    messages = [{"role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}]
    assert requests[0] == McpSampling(server=f"'{sys.executable}'", messages=messages, max_tokens=10)


async def test_agent_answers_the_requests_of_its_server() -> None:
    call = {"tool_call": {"name": "ask", "arguments": {"method": "sampling/createMessage"}}}
    sampler = Agent(model="scripted", transport=ScriptedTransport({"rules": [{"answers": ["Hello!"]}]}))

    async def sample(request: McpSampling) -> str:
        outcome = await sampler.run(request.messages, settings={"max_output_tokens": request.max_tokens})
        return outcome.text

    model = ScriptedTransport({"rules": [{"answers": [[call], "Done."]}]})
    async with start(on_sampling=sample) as server:
        outcome = await Agent(model="scripted", transport=model, tools=[server]).run("Go.")
    assert (outcome.kind, json.loads(outcome.history[2]["output"])["content"]["text"]) == ("final", "Hello!")


@pytest.mark.parametrize("program", ["mcp_eliciting_server.py", "mcp_modern_server.py"])
async def test_question_is_answered_in_every_version_of_the_protocol(program: str) -> None:
    async def answer(question: McpElicitation) -> dict[str, object]:
        assert question.message == "Your name?"
        return {"name": "Ada"}

    path = Path(__file__).parents[1] / "support" / program
    async with McpServer.stdio(sys.executable, [str(path)], on_elicitation=answer) as server:
        (tool,) = server.tools
        context = ToolContext(run_id="run", call_id="call", idempotency_key="key")
        result = await tool.invoke("{}", context)
    assert (result.is_error, result.output) == (False, "Hello, Ada!")


async def test_server_that_asks_without_end_fails_the_call() -> None:
    path = Path(__file__).parents[1] / "support" / "mcp_modern_server.py"
    async with McpServer.stdio(
        sys.executable, [str(path), "endless"], on_elicitation=lambda _: {"name": "Ada"}
    ) as server:
        (tool,) = server.tools
        context = ToolContext(run_id="run", call_id="call", idempotency_key="key")
        result = await tool.invoke("{}", context)
    reason = "Server returned InputRequiredResult for more than 10 rounds"
    error = f"The MCP server '{sys.executable}' returned no result: {reason}"
    assert (result.is_error, json.loads(str(result.output))) == (True, {"error": error})
