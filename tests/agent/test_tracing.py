"""Spans of agent runs: one tree over turns, tools, subagents, retries and resumed runs."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from antiphon import Agent, ConfigError, MemorySession, tool
from antiphon.agent import tracing
from antiphon.agent.execute.envelope import AgentExecuteResponse, ConversationContext
from antiphon.agent.execute.execution import Execution
from antiphon.agent.execute.wire import AgentExecuteBody
from antiphon.agent.orchestrator import review
from antiphon.agent.provider import Provider
from antiphon.agent.tracing import instrument, uninstrument
from antiphon.errors import RateLimited, ServerError
from antiphon.ledger import Ledger
from antiphon.telemetry.environment import CONTENT_VARIABLE
from support.scripted_model import ScriptedModel, UpstreamModel, call, look_up, open_scripted, usage

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from antiphon.telemetry.conventions import MAX_CONTENT_BYTES


class Spans:
    """The spans that were exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def find(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def tree(self) -> list[tuple[str, str]]:
        """Return the name of each span with that of its parent, in the order in which they began."""
        names = {span.context.span_id: span.name for span in self.all}
        ordered = sorted(self.all, key=lambda span: span.start_time or 0)
        return [(span.name, names.get(span.parent.span_id, "remote") if span.parent else "") for span in ordered]


@pytest.fixture
def spans() -> Iterator[Spans]:
    exported = Spans()
    instrument(exported.provider)
    yield exported
    uninstrument()


AGENT = "invoke_agent agent"


async def test_run_is_one_tree_of_spans(scripted: ScriptedModel, spans: Spans) -> None:
    scripted.set_answers([call("look_up", {"city": "Bern"})], "It is mild.")
    outcome = await scripted.agent(tools=[look_up]).run("How is it?")
    assert outcome.kind == "final"
    assert spans.tree() == [
        (AGENT, ""),
        ("chat scripted", AGENT),
        ("execute_tool look_up", AGENT),
        ("chat scripted", AGENT),
    ]
    assert len({span.context.trace_id for span in spans.all}) == 1


async def test_spans_have_the_attributes_of_the_conventions(in_process: ScriptedModel, spans: Spans) -> None:
    in_process.set_answers([usage(30, 5), call("look_up", {"city": "Bern"})], [usage(50, 7), {"text": "Mild."}])
    agent = in_process.agent(name="guide", tools=[look_up], settings={"temperature": 0.5, "max_output_tokens": 99})
    outcome = await agent.run("How is it?", run_id="run_1")
    first, second = spans.find("chat scripted")
    (tool_span,) = spans.find("execute_tool look_up")
    (agent_span,) = spans.find("invoke_agent guide")
    assert (first.kind, tool_span.kind, agent_span.kind) == (
        trace.SpanKind.CLIENT,
        trace.SpanKind.INTERNAL,
        trace.SpanKind.INTERNAL,
    )
    ids = [dict(span.attributes or {}).pop("gen_ai.response.id") for span in (first, second)]
    assert len(set(ids)) == 2
    assert dict(first.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 99,
        "gen_ai.response.id": ids[0],
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("tool_call",),
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 0,
    }
    assert (second.attributes or {})["gen_ai.response.finish_reasons"] == ("stop",)
    assert dict(tool_span.attributes or {}) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look_up",
        "gen_ai.tool.call.id": "call_1",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.description": "The weather of a city.",
        "antiphon.idempotency_key": "run_1:1:0",
    }
    assert dict(agent_span.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "openai",
        "gen_ai.agent.name": "guide",
        "gen_ai.request.model": "scripted",
        "antiphon.run.id": "run_1",
        "antiphon.outcome": "final",
        "antiphon.turns": outcome.turns,
        "gen_ai.usage.input_tokens": 80,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 0,
    }


async def test_subagent_is_below_the_call_that_started_it(in_process: ScriptedModel, spans: Spans) -> None:
    in_process.set_answers(
        [call("ask", {"input": "How is it?"})], [call("look_up", {"city": "Bern"})], "Mild.", "It is mild."
    )
    helper = in_process.agent(name="helper", tools=[look_up])
    agent = in_process.agent(tools=[helper.as_tool("ask", "Ask the helper.")])
    assert (await agent.run("How is it?", run_id="run_1")).kind == "final"
    child = "invoke_agent helper"
    assert spans.tree() == [
        (AGENT, ""),
        ("chat scripted", AGENT),
        ("execute_tool ask", AGENT),
        (child, "execute_tool ask"),
        ("chat scripted", child),
        ("execute_tool look_up", child),
        ("chat scripted", child),
        ("chat scripted", AGENT),
    ]
    (span,) = spans.find(child)
    ids = [(span.attributes or {})[name] for name in ("antiphon.run.id", "antiphon.run.parent_id")]
    assert ids == ["run_1:1:0", "run_1"]


async def test_failed_attempt_at_a_turn_has_a_span_of_its_own(in_process: ScriptedModel, spans: Spans) -> None:
    in_process.set_answers("Hello.")
    in_process.transport.refusals = [ServerError("Too hot."), RateLimited("Slow down.", code="slow_down")]
    assert (await in_process.agent().run("Hello!")).kind == "final"
    found = [
        (span.status.status_code.name, (span.attributes or {}).get("error.type"))
        for span in spans.find("chat scripted")
    ]
    assert found == [("ERROR", "server_error"), ("ERROR", "slow_down"), ("UNSET", None)]
    assert spans.find(AGENT)[0].status.status_code.name == "UNSET"


async def test_failed_run_and_failed_tool_have_an_error_status(in_process: ScriptedModel, spans: Spans) -> None:
    @tool(retries=1)
    async def break_down() -> str:
        """Fail."""
        raise ValueError("no fuse")

    in_process.set_answers([call("break_down")], [{"raise": {"message": "Not that.", "status": 400}}])
    outcome = await in_process.agent(tools=[break_down]).run("Go.")
    assert outcome.kind == "failed"
    (tool_span,), (agent_span,) = spans.find("execute_tool break_down"), spans.find(AGENT)
    assert (tool_span.status.status_code.name, [event.name for event in tool_span.events]) == ("ERROR", ["retry"])
    assert (agent_span.status.status_code.name, agent_span.status.description) == ("ERROR", "Not that.")


async def test_current_span_of_a_tool_is_its_call(in_process: ScriptedModel, spans: Spans) -> None:
    seen: dict[str, int] = {}

    @tool
    async def in_the_loop() -> str:
        """Look at the span."""
        seen["in_the_loop"] = trace.get_current_span().get_span_context().span_id
        return ""

    @tool
    def in_a_thread() -> str:
        """Look at the span, in a thread."""
        assert threading.current_thread() is not threading.main_thread()
        seen["in_a_thread"] = trace.get_current_span().get_span_context().span_id
        return ""

    in_process.set_answers([call("in_the_loop", call_id="a"), call("in_a_thread", call_id="b")], "Done.")
    await in_process.agent(tools=[in_the_loop, in_a_thread]).run("Go.")
    assert seen == {name: spans.find(f"execute_tool {name}")[0].context.span_id for name in seen}
    assert len(seen) == 2


async def test_run_within_a_span_of_the_program_is_below_it(in_process: ScriptedModel, spans: Spans) -> None:
    in_process.set_answers("Hello.")
    with spans.provider.get_tracer("program").start_as_current_span("request") as outer:
        await in_process.agent().run("Hello!")
        assert trace.get_current_span() is outer
    assert (AGENT, "request") in spans.tree()


async def test_resumed_run_is_in_the_trace_of_the_run(in_process: ScriptedModel, spans: Spans, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    in_process.set_answers([call("pay")], "It is paid.")
    agent = in_process.agent(tools=[pay])
    paused = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    await agent.resume("run_1", approvals={each.call_id: True for each in paused.pending}, ledger=ledger)
    first, second = spans.find(AGENT)
    assert (first.attributes or {})["antiphon.outcome"] == "needs_approval"
    assert second.parent is not None
    assert (second.parent.span_id, second.context.trace_id) == (first.context.span_id, first.context.trace_id)
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    # A program that has a span of its own gets the link only.
    with spans.provider.get_tracer("program").start_as_current_span("request") as outer:
        await agent.resume("run_1", ledger=ledger)
    third = spans.find(AGENT)[2]
    assert third.parent is not None
    assert third.parent.span_id == outer.get_span_context().span_id
    assert [link.context.span_id for link in third.links] == [second.context.span_id]


async def test_cancelled_run_ends_its_spans(in_process: ScriptedModel, spans: Spans) -> None:
    in_process.set_answers([{"text": "Hel"}, {"text": "lo."}])
    events = in_process.agent().run_stream("Hello!")
    async for event in events:
        if event.__class__.__name__ == "TextDelta":
            break
    await events.aclose()
    found = {span.name: (span.attributes or {}).get("error.type") for span in spans.all}
    assert found[AGENT] == "cancelled"
    assert len(spans.all) == 2


async def test_content_is_recorded_only_on_request(
    in_process: ScriptedModel, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> str:
        in_process.set_answers([call("look_up", {"city": "Bern"})], "It is mild.")
        agent = in_process.agent(tools=[look_up], instructions="Be kind.")
        await agent.run("How is the secret?")
        return json.dumps([dict(span.attributes or {}) for span in spans.all], default=str)

    recorded = await run()
    for text in ("secret", "Bern", "mild", "Be kind"):
        assert text not in recorded
    monkeypatch.setenv(CONTENT_VARIABLE, "SPAN_ONLY")
    instrument(spans.provider)
    await run()
    attributes = [dict(span.attributes or {}) for span in spans.all]
    last = next(each for each in reversed(attributes) if each["gen_ai.operation.name"] == "chat")
    assert json.loads(last["gen_ai.system_instructions"]) == [{"type": "text", "content": "Be kind."}]
    assert json.loads(last["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "How is the secret?"}]},
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "call_1", "name": "look_up", "arguments": {"city": "Bern"}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "Bern: mild"}]},
    ]
    assert json.loads(last["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "It is mild."}], "finish_reason": "stop"}
    ]
    executed = next(each for each in reversed(attributes) if each["gen_ai.operation.name"] == "execute_tool")
    assert (executed["gen_ai.tool.call.arguments"], executed["gen_ai.tool.call.result"]) == (
        '{"city":"Bern"}',
        "Bern: mild",
    )


async def test_large_arguments_and_results_are_replaced_by_their_sizes(in_process: ScriptedModel, spans: Spans) -> None:
    instrument(spans.provider, capture_content=True)
    in_process.set_answers([call("look_up", {"city": "x" * MAX_CONTENT_BYTES})], "It is mild.")
    await in_process.agent(tools=[look_up]).run("How is it?")
    executed = next(dict(span.attributes or {}) for span in spans.all if span.name.startswith("execute_tool"))
    sizes = [len(text) + MAX_CONTENT_BYTES for text in ('{"city":""}', ": mild")]
    recorded = [executed[f"gen_ai.tool.call.{name}"] for name in ("arguments", "result")]
    assert recorded == [f'"omitted: {size} bytes"' for size in sizes]


async def test_credentials_of_tools_are_not_recorded(in_process: ScriptedModel, spans: Spans) -> None:
    instrument(spans.provider, capture_content=True)
    in_process.set_answers("Hello.")
    server = {"type": "mcp", "server_label": "shop", "server_url": "https://example.com/mcp", "authorization": "k1"}
    agent = in_process.agent(settings={"tools": [server | {"headers": {"X-Key": "k2"}}]})
    await agent.run("Hello!")
    (definitions,) = json.loads(str((spans.find("chat scripted")[0].attributes or {})["gen_ai.tool.definitions"]))
    assert definitions == {"type": "mcp", "server_label": "shop", "server_url": "https://example.com/mcp"}


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
    ],
)
def test_variables_turn_traces_on(variables: dict[str, str], is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracing._Switch, "is_decided", False)
    monkeypatch.setattr(tracing._Switch, "tracing", None)
    assert (tracing.find_tracing() is not None) is is_on


def test_unknown_exporter_is_a_warning_and_no_error_of_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    monkeypatch.setattr(tracing._Switch, "is_decided", False)
    monkeypatch.setattr(tracing._Switch, "tracing", None)
    assert tracing.find_tracing() is None
    assert "no exporter 'pigeon' is installed" in caplog.text
    with pytest.raises(ConfigError, match="no exporter 'pigeon' is installed"):
        instrument()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "antiphon.agent.spans"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'antiphon\[otel\]'"):
        instrument()


def test_opentelemetry_is_not_imported_without_configuration() -> None:
    code = """
import sys
from antiphon import Agent
from antiphon.errors import ServerError

class Broken:
    async def stream(self, request):
        raise ServerError("no server")
    async def close(self):
        pass

print(Agent(model="x", transport=Broken(), turn_retries=0).run_sync("Hello!").kind)
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["failed", "[]"]


async def test_agent_after_a_handoff_has_a_span_of_its_own(
    in_process: ScriptedModel, spans: Spans, ledger: Ledger
) -> None:
    @tool(needs_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    in_process.set_answers([call("transfer_to_payer")], [call("pay", call_id="call_2")], "It is paid.")
    agent = in_process.agent(handoffs=[in_process.agent(name="payer", tools=[pay])])
    paused = await agent.run("Pay.", ledger=ledger, run_id="run_1")
    payer = "invoke_agent payer"
    first = [
        (AGENT, ""),
        ("chat scripted", AGENT),
        ("execute_tool transfer_to_payer", AGENT),
        (payer, AGENT),
        ("chat scripted", payer),
    ]
    assert (paused.kind, spans.tree()) == ("needs_approval", first)
    done = await agent.resume("run_1", approvals={each.call_id: True for each in paused.pending}, ledger=ledger)
    resumed = [(AGENT, AGENT), (payer, AGENT), ("execute_tool pay", payer), ("chat scripted", payer)]
    assert (done.kind, spans.tree()) == ("final", first + resumed)


async def test_server_is_named_and_gets_the_trace_in_a_header(spans: Spans) -> None:
    async with open_scripted("upstream") as scripted:
        assert isinstance(scripted, UpstreamModel)
        scripted.set_answers("Hello.")
        agent = Agent(model="scripted", base_url=scripted.upstream.url)
        await agent.run("Hello!")
        await agent.close()
        address = urlsplit(scripted.upstream.url)
        headers = scripted.upstream.requests[-1].headers
    (span,) = spans.find("chat scripted")
    attributes = dict(span.attributes or {})
    assert (attributes["server.address"], attributes["server.port"]) == (address.hostname, address.port)
    ids = f"{span.context.trace_id:032x}-{span.context.span_id:016x}"
    assert headers["traceparent"] == f"00-{ids}-{span.context.trace_flags:02x}"


async def test_session_is_the_conversation_of_a_run(in_process: ScriptedModel, spans: Spans) -> None:
    in_process.set_answers("Hello.")
    session = MemorySession()
    await in_process.agent().run("Hello!", session=session)
    (span,) = spans.find(AGENT)
    assert (span.attributes or {})["gen_ai.conversation.id"] == session.session_id


# Reviews and turns of the execute endpoint


async def test_review_is_one_tree_of_spans(spans: Spans, in_process: ScriptedModel) -> None:
    decision = call("submit_decision", {"is_approved": True, "reason": "good"}, "call_d")
    in_process.set_answers([call("look_up", {"city": "Bern"})], [decision])
    outcome = await review(Provider(in_process.transport, model="scripted"), [look_up], "Is it mild?")
    assert outcome.kind == "decision"
    assert spans.tree() == [
        ("invoke_agent orchestrator", ""),
        ("chat scripted", "invoke_agent orchestrator"),
        ("execute_tool look_up", "invoke_agent orchestrator"),
        ("chat scripted", "invoke_agent orchestrator"),
    ]
    (run,) = spans.find("invoke_agent orchestrator")
    assert run.attributes is not None
    assert run.attributes["antiphon.outcome"] == "decision"


async def test_failed_request_of_a_review_is_an_error_of_its_span(spans: Spans, in_process: ScriptedModel) -> None:
    in_process.transport.refusals = [ServerError("Broken.")]
    outcome = await review(Provider(in_process.transport, model="scripted"), [], "Is it mild?")
    assert outcome.kind == "failed"
    assert [span.status.is_ok for span in spans.find("chat scripted")] == [False]


async def test_turn_of_the_execute_endpoint_is_one_tree_of_spans(spans: Spans, in_process: ScriptedModel) -> None:
    in_process.set_answers([call("look_up", {"city": "Bern"})], "It is mild.")
    execution = Execution(
        AgentExecuteBody(instruction="How is it in Bern?"),
        transport=in_process.transport,
        defaults=ConversationContext(model_name="scripted", temperature=0.0),
        tools=[look_up],
    )
    *_, envelope = [event async for event in execution.events()]
    assert isinstance(envelope, AgentExecuteResponse)
    assert envelope.text == "It is mild."
    assert spans.tree() == [
        ("invoke_agent execute", ""),
        ("chat scripted", "invoke_agent execute"),
        ("execute_tool look_up", "invoke_agent execute"),
        ("chat scripted", "invoke_agent execute"),
    ]
