"""A typed agent program. The tests check it with mypy and pyright in strict mode, and run it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_type

from antiphon import (
    Agent,
    CommandOutput,
    Limits,
    Outcome,
    PartialOutput,
    RunContext,
    RunEnded,
    RunEvent,
    ShellRequest,
    TextDelta,
    Tool,
    ToolContext,
    ToolFinished,
    Toolset,
    WebSearch,
    shell_tool,
    tool,
)
from antiphon.agent.transports.base import Transport
from antiphon.evals import Case, contains, evaluate


@dataclass
class Warehouse:
    stock: dict[str, int]
    customer: str


@dataclass
class Offer:
    product: str
    pieces: int


@tool
def count_stock(context: RunContext[Warehouse], product: str) -> int:
    """Return the number of pieces in stock."""
    return context.deps.stock.get(product, 0)


@tool(timeout=10.0, retries=1)
async def reserve(product: str, pieces: int, context: ToolContext[Warehouse]) -> str:
    """Reserve pieces of a product."""
    context.report(f"{pieces} pieces for {context.deps.customer}")
    context.deps.stock[product] -= pieces
    return context.idempotency_key


async def make_instructions(context: RunContext[Warehouse]) -> str:
    return f"You serve {context.deps.customer}."


def choose_tools(context: RunContext[Warehouse]) -> Sequence[Tool]:
    return [count_stock, reserve] if context.deps.stock else [count_stock]


async def choose_set(context: RunContext[Warehouse]) -> Sequence[Tool | Toolset]:
    return [Toolset(count_stock).prefix(f"{context.deps.customer}_"), reserve]


def make_agent_with_sets(transport: Transport) -> Agent[Warehouse, str]:
    tools = Toolset(count_stock, Toolset.dynamic(choose_set)).require_approval(lambda given: "pieces" in given)
    return Agent(model="scripted", transport=transport, deps_type=Warehouse, tools=[tools, WebSearch()])


def run_commands(request: ShellRequest, context: ToolContext[Warehouse]) -> list[CommandOutput]:
    return [CommandOutput(f"{context.deps.customer}: {command}") for command in request.commands]


shell = shell_tool(run_commands, needs_approval=lambda given: bool(given["commands"]))


def log(event: RunEvent, context: RunContext[Warehouse]) -> None:
    if isinstance(event, ToolFinished):
        context.deps.stock.setdefault(event.call.name, 0)


def make_agent(transport: Transport) -> Agent[Warehouse, Offer]:
    return Agent(
        model="scripted",
        transport=transport,
        deps_type=Warehouse,
        output_type=Offer,
        instructions=make_instructions,
        tools=choose_tools,
        hooks=[log],
        limits=Limits(turns=5),
    )


async def offer(transport: Transport, warehouse: Warehouse) -> Offer:
    agent = make_agent(transport)
    outcome = await agent.run("Offer two chairs.", deps=warehouse, limits=Limits(turns=3), model="scripted")
    assert_type(outcome, Outcome[Offer])
    assert_type(outcome.output, Offer)
    return outcome.output


async def watch(transport: Transport) -> str:
    agent = Agent(model="scripted", transport=transport)
    assert_type(agent, Agent[None, str])
    stream = agent.run_stream("Hello.")
    shown: list[str] = []
    async for event in stream:
        match event:
            case TextDelta(text=text):
                shown.append(text)
            case RunEnded(outcome=ended):
                shown.append(ended.kind)
            case _:
                pass
    assert_type(stream.outcome.output, str)
    return stream.outcome.output


async def score(transport: Transport) -> bool:
    agent = Agent(model="scripted", transport=transport)
    report = await evaluate(agent, [Case("greeting", input="Hello.")], [contains("Hello")])
    return report.has_passed


@tool(final=True)
def confirm(pieces: int) -> Offer:
    """Confirm the offer."""
    return Offer("chair", pieces)


async def watch_output(transport: Transport) -> Offer:
    agent = Agent(model="scripted", transport=transport, output_type=Offer, output_mode="tool", tools=[confirm])
    stream = agent.run_stream("Offer two chairs.", partial_output=True)
    partial = [event.data async for event in stream if isinstance(event, PartialOutput)]
    assert partial
    assert_type(stream.outcome.output, Offer)
    return stream.outcome.output


def call_tools(warehouse: Warehouse) -> int:
    """Call the functions of the tools directly, with their types."""
    context = ToolContext(run_id="run", call_id="call", idempotency_key="key", deps=warehouse)
    pieces = count_stock(context, "chair")
    assert_type(pieces, int)
    reserving = reserve("chair", pieces=1, context=context)
    assert_type(asyncio.run(reserving), str)
    return pieces


explicit = Agent[Warehouse, list[int]](model="scripted", base_url="http://127.0.0.1:1/v1", output_type=list[int])
assert_type(explicit, Agent[Warehouse, list[int]])
