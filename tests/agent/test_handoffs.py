"""Handoffs: the run goes on as another agent, also after an interruption."""

import asyncio
import copy
import json
from dataclasses import dataclass
from typing import Any

import pytest

from antiphon import Agent, ConfigError, InvalidRequest, Limits, Prices, ToolContext, tool
from antiphon.agent.handoffs import SECOND_HANDOFF, Handoff, drop_tool_calls
from antiphon.agent.outcome import AgentChanged, RunEnded, RunEvent
from antiphon.ledger import Ledger
from antiphon.store.ledger import MemoryLedger
from support.scripted_model import ScriptedModel, call, look_up, outputs_of, usage

TO_BILLING = call("transfer_to_billing", {}, "call_h")
TO_TRIAGE = call("transfer_to_triage", {}, "call_b")
HANDED_OVER = "The conversation was handed over to billing."


def names_of_tools(request: dict[str, Any]) -> list[str]:
    return [each["name"] for each in request.get("tools", ())]


async def test_run_goes_on_as_the_other_agent(scripted: ScriptedModel) -> None:
    scripted.set_answers([TO_BILLING], [call("look_up", {"city": "Bern"})], "Paid.")
    billing = scripted.agent(
        name="billing", instructions="You pay.", tools=[look_up], settings={"temperature": 0.5}, model="scripted"
    )
    triage = scripted.agent(name="triage", instructions="You route.", handoffs=[billing])
    events = [event async for event in triage.run_stream("Pay.")]
    first, second, third = scripted.sent
    assert (first["instructions"], names_of_tools(first)) == ("You route.", ["transfer_to_billing"])
    assert (second["instructions"], names_of_tools(second)) == ("You pay.", ["look_up"])
    assert (second["temperature"], third["instructions"]) == (0.5, "You pay.")
    assert second["input"][0] == {"role": "user", "content": "Pay."}
    assert outputs_of(second) == [("call_h", HANDED_OVER)]
    (changed,) = [event for event in events if isinstance(event, AgentChanged)]
    assert (changed.from_agent, changed.agent) == ("triage", "billing")
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.outcome.kind, ended.outcome.agent, ended.outcome.text) == ("final", "billing", "Paid.")
    assert (ended.outcome.turns, ended.outcome.tool_calls) == (3, 2)


async def test_conversation_on_the_server_goes_over_too(scripted: ScriptedModel) -> None:
    scripted.set_answers([TO_BILLING], [call("look_up", {"city": "Bern"})], "Paid.")
    billing = scripted.agent(name="billing", tools=[look_up], conversation_state="server")
    outcome = await scripted.agent(name="triage", handoffs=[billing], conversation_state="server").run("Pay.")
    assert (outcome.kind, outcome.agent) == ("final", "billing")
    first, second, third = scripted.sent[-3:]
    assert [item.get("type", "message") for item in second["input"]] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    assert ("previous_response_id" in second, "previous_response_id" in first) == (False, False)
    assert outputs_of(third)[-1][1] == "Bern: mild"


async def test_handoff_is_described_as_configured(in_process: ScriptedModel) -> None:
    @dataclass
    class Reason:
        reason: str

    received: list[tuple[str, Reason]] = []

    async def note(context: ToolContext, given: Reason) -> None:
        received.append((context.idempotency_key, given))

    in_process.set_answers([call("escalate", {"reason": "angry"}, "call_h")], "Sorry.")
    boss = in_process.agent(name="the boss")
    handoff = Handoff(boss, name="escalate", description="To the boss.", input_type=Reason, on_handoff=note)
    outcome = await in_process.agent(handoffs=[handoff]).run("Grr.", run_id="run_1")
    assert (outcome.agent, received) == ("the boss", [("run_1:1:0", Reason("angry"))])
    (described,) = in_process.sent[0]["tools"]
    assert described == {
        "type": "function",
        "name": "escalate",
        "description": "To the boss.",
        "parameters": {
            "type": "object",
            "properties": {"reason": {"type": "string"}},
            "required": ["reason"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    assert Handoff(boss).tool.name == "transfer_to_the_boss"


async def test_failed_handoff_leaves_the_run_with_its_agent(in_process: ScriptedModel) -> None:
    def refuse(_: ToolContext) -> None:
        raise ValueError("closed on Sundays")

    def lose(_: list[dict[str, Any]]) -> Any:
        return "nothing"

    billing = in_process.agent(name="billing")
    for handoff, reason in (
        (Handoff(billing, on_handoff=refuse), "ValueError: closed on Sundays"),
        (
            Handoff(billing, input_filter=lose),
            "The handoff failed: TypeError: input_filter must return a list of items",
        ),
    ):
        in_process.set_answers([TO_BILLING], "Then not.")
        outcome = await in_process.agent(name="triage", handoffs=[handoff]).run("Pay.")
        assert (outcome.kind, outcome.agent) == ("final", "triage")
        assert json.loads(outputs_of(in_process.sent[-1])[0][1]) == {"error": reason}


async def test_filter_changes_what_the_next_agent_reads_and_not_the_outcome(
    in_process: ScriptedModel, ledger: Ledger
) -> None:
    in_process.set_answers([call("look_up", {"city": "Bern"})], [TO_BILLING], "Paid.", [call("pay", {}, "call_2")])
    billing = in_process.agent(name="billing")
    triage = in_process.agent(name="triage", tools=[look_up], handoffs=[Handoff(billing, input_filter=drop_tool_calls)])
    outcome = await triage.run("Pay.", ledger=ledger, run_id="run_1")
    assert in_process.sent[-1]["input"] == [{"role": "user", "content": "Pay."}]
    kinds = ["message", "function_call", "function_call_output", "function_call", "function_call_output", "message"]
    assert [item.get("type", "message") for item in outcome.history] == kinds
    assert (await triage.resume("run_1", ledger=ledger)).history == outcome.history


async def test_async_filter_gets_the_handoff(in_process: ScriptedModel) -> None:
    seen: list[list[dict[str, Any]]] = []

    async def shorten(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        seen.append(items)
        return [{"role": "user", "content": "In short: pay."}]

    in_process.set_answers([TO_BILLING], "Paid.")
    billing = in_process.agent(name="billing")
    await in_process.agent(name="triage", handoffs=[Handoff(billing, input_filter=shorten)]).run("Pay.")
    assert seen[0][-1] == {"type": "function_call_output", "call_id": "call_h", "output": HANDED_OVER}
    assert in_process.sent[-1]["input"] == [{"role": "user", "content": "In short: pay."}]


async def test_other_calls_of_the_turn_run_before_the_first_handoff(in_process: ScriptedModel) -> None:
    second = call("transfer_to_sales", {}, "call_s")
    in_process.set_answers([TO_BILLING, second, call("look_up", {"city": "Bern"}, "call_l")], "Paid.")
    agents = [in_process.agent(name="billing"), in_process.agent(name="sales")]
    outcome = await in_process.agent(tools=[look_up], handoffs=agents).run("Pay.")
    assert outcome.agent == "billing"
    assert outputs_of(in_process.sent[-1]) == [
        ("call_h", HANDED_OVER),
        ("call_s", json.dumps({"error": SECOND_HANDOFF}, separators=(",", ":"))),
        ("call_l", "Bern: mild"),
    ]


async def test_handoff_waits_for_the_approval_of_other_calls(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    in_process.set_answers([TO_BILLING, call("pay", {}, "call_p")], "Paid.")
    triage = in_process.agent(name="triage", tools=[pay], handoffs=[in_process.agent(name="billing")])
    paused = await triage.run("Pay.", ledger=ledger, run_id="run_1")
    assert (paused.kind, paused.agent, [each.call_id for each in paused.pending]) == (
        "needs_approval",
        "triage",
        ["call_p"],
    )
    outcome = await triage.resume("run_1", approvals={"call_p": True}, ledger=ledger)
    assert (outcome.kind, outcome.agent) == ("final", "billing")
    assert outputs_of(in_process.sent[-1]) == [("call_h", HANDED_OVER), ("call_p", "paid")]


@pytest.mark.parametrize(("verdict", "agent"), [(True, "billing"), ("Not now.", "triage")])
async def test_handoff_can_need_approval(in_process: ScriptedModel, verdict: bool | str, agent: str) -> None:
    in_process.set_answers([TO_BILLING], "Done.")
    billing = in_process.agent(name="billing")
    triage = in_process.agent(name="triage", handoffs=[Handoff(billing, needs_approval=True)])
    paused = await triage.run("Pay.")
    assert paused.state is not None
    outcome = await triage.resume(paused.state, approvals={"call_h": verdict})
    assert (outcome.kind, outcome.agent) == ("final", agent)


async def test_run_is_handed_over_and_back(in_process: ScriptedModel) -> None:
    in_process.set_answers([TO_BILLING], [call("look_up", {"city": "Bern"})], [TO_TRIAGE], [TO_BILLING], "Paid.")
    triage = in_process.agent(name="triage", instructions="You route.")
    billing = in_process.agent(name="billing", instructions="You pay.", tools=[look_up], handoffs=[triage])
    triage.add_handoffs(billing)
    outcome = await triage.run("Pay.")
    assert (outcome.kind, outcome.agent, outcome.turns) == ("final", "billing", 5)
    assert [each["instructions"] for each in in_process.sent] == [
        "You route.",
        "You pay.",
        "You pay.",
        "You route.",
        "You pay.",
    ]


async def test_handoffs_without_other_progress_end_the_run(in_process: ScriptedModel) -> None:
    in_process.set_answers(*[[TO_BILLING], [TO_TRIAGE]] * 2, [TO_BILLING], "I give up.")
    triage = in_process.agent(name="triage", limits=Limits(turns=None))
    billing = in_process.agent(name="billing", handoffs=[triage])
    triage.add_handoffs(billing)
    outcome = await triage.run("Pay.")
    assert (outcome.kind, outcome.agent, outcome.text) == ("no_progress", "triage", "I give up.")


async def test_limits_of_the_first_agent_apply_to_the_whole_run(in_process: ScriptedModel) -> None:
    in_process.set_answers([TO_BILLING], *[[call("look_up", {"city": str(n)})] for n in range(9)])
    billing = in_process.agent(name="billing", tools=[look_up], limits=Limits(turns=1))
    triage = in_process.agent(name="triage", handoffs=[billing], limits=Limits(turns=4, wrap_up=False))
    outcome = await triage.run("Pay.")
    assert (outcome.kind, outcome.turns, outcome.agent) == ("max_turns", 4, "billing")


async def test_each_turn_costs_the_price_of_its_agent(in_process: ScriptedModel) -> None:
    in_process.set_answers([TO_BILLING, usage(100, 0)], [{"text": "Paid."}, usage(10, 0)])
    first = Prices(input=1_000_000, output=0)
    for own, cost in ((Prices(input=5_000_000, output=0), 150.0), (None, 110.0)):
        in_process.set_answers([TO_BILLING, usage(100, 0)], [{"text": "Paid."}, usage(10, 0)])
        billing = in_process.agent(name="billing", prices=own)
        outcome = await in_process.agent(name="triage", handoffs=[billing], prices=first).run("Pay.")
        assert (outcome.cost, outcome.usage.total_tokens) == (cost, 110)


async def test_output_type_is_that_of_the_last_agent(in_process: ScriptedModel) -> None:
    in_process.set_answers([TO_BILLING], '{"value": [1, 2]}')
    billing = in_process.agent(name="billing", output_type=list[int])
    outcome = await in_process.agent(name="triage", handoffs=[billing], output_type=str).run("Pay.")
    assert (outcome.kind, outcome.output) == ("final", [1, 2])


async def test_forced_tool_choice_applies_again_after_a_handoff(in_process: ScriptedModel) -> None:
    in_process.set_answers([TO_BILLING], [call("look_up", {"city": "Bern"})], "Mild.")
    forced = {"tool_choice": "required"}
    billing = in_process.agent(name="billing", tools=[look_up], settings=forced)
    await in_process.agent(name="triage", handoffs=[billing], settings=forced).run("Pay.")
    assert [request.get("tool_choice") for request in in_process.sent] == ["required", "required", None]


async def test_reasoning_of_another_model_is_not_sent(in_process: ScriptedModel) -> None:
    for model, count in (("scripted", 1), ("scripted-2", 0)):
        in_process.set_answers([{"reasoning": "Hm."}, TO_BILLING], "Paid.")
        billing = in_process.agent(name="billing", model=model)
        await in_process.agent(name="triage", handoffs=[billing]).run("Pay.")
        encrypted = [item for item in in_process.sent[-1]["input"] if item.get("encrypted_content")]
        assert (in_process.sent[-1]["model"], len(encrypted)) == (model, count)


async def test_resumed_run_goes_on_in_the_right_agent(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay(context: ToolContext) -> str:
        """Pay."""
        return context.idempotency_key

    in_process.set_answers([TO_BILLING], [call("pay", {}, "call_p")], "Paid.")
    billing = in_process.agent(name="billing", instructions="You pay.", tools=[pay])
    triage = in_process.agent(name="triage", handoffs=[billing])
    paused = await triage.run("Pay.", ledger=ledger, run_id="run_1")
    assert (paused.kind, paused.agent) == ("needs_approval", "billing")
    alone = in_process.agent(name="triage")
    with pytest.raises(
        InvalidRequest, match="handed over to the agent 'billing', and no handoff of 'triage'"
    ) as raised:
        await alone.resume("run_1", approvals={"call_p": True}, ledger=ledger)
    assert (raised.value.param, raised.value.code) == ("run", "unknown_agent")
    outcome = await triage.resume("run_1", approvals={"call_p": True}, ledger=ledger)
    assert (outcome.kind, outcome.agent, in_process.sent[-1]["instructions"]) == ("final", "billing", "You pay.")
    assert outputs_of(in_process.sent[-1])[-1] == ("call_p", "run_1:2:0")
    assert (await triage.resume("run_1", ledger=ledger)).agent == "billing"


async def test_handoffs_survive_a_crash_at_every_entry(in_process: ScriptedModel) -> None:
    noted: list[str] = []
    paid: list[tuple[int, str]] = []
    crashes: list[tuple[MemoryLedger, set[tuple[int, str]]]] = []

    class Watched(MemoryLedger):
        async def append(self, *arguments: Any, **options: Any) -> None:
            await super().append(*arguments, **options)
            crashes.append((copy.deepcopy(self), set(paid)))

    @tool(on_interrupt="retry")
    async def pay(number: int, context: ToolContext) -> str:
        """Pay."""
        paid.append((number, context.idempotency_key))
        return f"paid {number}"

    async def note(context: ToolContext) -> None:
        noted.append(context.idempotency_key)

    def shorten(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [items[0], items[-1], {"role": "user", "content": "Go on."}]

    calls = [call("pay", {"number": number}, f"call_{number}") for number in range(4)]
    answers = ([calls[0], TO_BILLING, calls[1]], [calls[2], TO_TRIAGE], [calls[3]], "Done.")
    triage = in_process.agent(name="triage", tools=[pay])
    billing = in_process.agent(name="billing", tools=[pay], handoffs=[Handoff(triage, on_handoff=note)])
    triage.add_handoffs(Handoff(billing, on_handoff=note, input_filter=shorten))
    in_process.set_answers(*answers)
    first = await triage.run("Pay.", ledger=Watched(), run_id="run_1")
    payments = set(paid)
    assert (first.agent, len(payments), len(crashes)) == ("triage", 4, 18)
    for ledger, before in crashes[:-1]:
        entries = await ledger.read("run_1")
        in_process.set_answers(*answers[sum(b'"Answered"' in entry for entry in entries) :], "Unused.")
        paid.clear()
        outcome = await triage.resume("run_1", ledger=ledger)
        assert (outcome.kind, outcome.agent, outcome.history) == ("final", "triage", first.history)
        assert before | set(paid) == payments
        finished = {json.loads(entry)["call_id"] for entry in entries if b'"Resulted"' in entry}
        assert finished.isdisjoint(f"call_{number}" for number, _ in paid)
    assert set(noted) == {"run_1:1:1", "run_1:2:1"}


async def test_agents_of_handoffs_have_different_names(in_process: ScriptedModel) -> None:
    agent = in_process.agent(handoffs=[in_process.agent()])
    with pytest.raises(ConfigError, match="Two agents of the handoffs are called 'agent'"):
        await agent.run("Go.")
    with pytest.raises(ConfigError, match="There are two tools called 'transfer_to_b'"):
        in_process.agent(handoffs=[in_process.agent(name="b"), in_process.agent(name="b")])
    with pytest.raises(ConfigError, match="handoffs: expected an agent, got str"):
        in_process.agent(handoffs=["billing"])
    with pytest.raises(ConfigError, match="requires on_handoff"):
        Handoff(agent, input_type=int)
    with pytest.raises(ConfigError, match="must be a type with fields"):
        Handoff(agent, input_type=int, on_handoff=print)


async def test_hooks_of_the_active_agent_are_called(in_process: ScriptedModel) -> None:
    seen: dict[str, list[RunEvent]] = {"triage": [], "billing": []}
    in_process.set_answers([TO_BILLING], "Paid.")
    billing = in_process.agent(name="billing", hooks=[seen["billing"].append])
    await in_process.agent(name="triage", handoffs=[billing], hooks=[seen["triage"].append]).run("Pay.")
    start = next(index for index, event in enumerate(seen["triage"]) if isinstance(event, AgentChanged))
    assert seen["billing"] == seen["triage"][start:]


async def test_subagent_can_hand_its_run_over(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    async def pay(context: ToolContext) -> str:
        """Pay."""
        return context.idempotency_key

    ask = call("expert", {"input": "Pay."}, "call_e")
    in_process.set_answers([ask], [TO_BILLING], [call("pay", {}, "call_p")], "Paid.", "It is paid.")
    billing = in_process.agent(name="billing", tools=[pay])
    triage = in_process.agent(name="triage", handoffs=[billing])
    agent = in_process.agent(tools=[triage.as_tool("expert", "Pays.")])
    paused = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert [each.call_id for each in paused.pending] == ["call_e/call_p"]
    outcome = await agent.resume("run_1", approvals={"call_e/call_p": True}, ledger=ledger)
    assert (outcome.kind, outcome.agent, outcome.text) == ("final", "agent", "It is paid.")


async def test_cancelled_run_of_the_second_agent_is_resumed(in_process: ScriptedModel, ledger: Ledger) -> None:
    begun = asyncio.Event()
    keys: list[str] = []

    @tool(on_interrupt="retry")
    async def pay(context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        begun.set()
        if len(keys) == 1:
            await asyncio.Event().wait()
        return "paid"

    in_process.set_answers([TO_BILLING], [call("pay", {}, "call_p")], "Paid.")
    agent: Agent = in_process.agent(name="triage", handoffs=[in_process.agent(name="billing", tools=[pay])])
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, outcome.agent, keys) == ("final", "billing", ["run_1:2:0"] * 2)
