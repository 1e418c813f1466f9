"""An agent: a model with instructions, tools and limits, and the ways to run it."""

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from antiphon.agent.http import HttpTransport
from antiphon.agent.journal import Began, Journal, JsonObject, Judged, load, unpack
from antiphon.agent.limits import Limits, Prices
from antiphon.agent.loop import Loop, RunEvents
from antiphon.agent.model import ResponsesModel
from antiphon.agent.outcome import Outcome, RunEnded, RunEvent
from antiphon.agent.task import Task
from antiphon.agent.transport import Transport
from antiphon.errors import ConfigError, InvalidRequest
from antiphon.ledger import EntryTaken, Ledger
from antiphon.tools.base import Tool, ToolContext, ToolResult
from antiphon.tools.execute import Executor, fail
from antiphon.tools.schema import Shape

logger = logging.getLogger(__name__)

Input = str | Sequence[JsonObject]
Verdict = bool | str
"""Whether a call may be made; a text is a no, with the reason for the model."""


class AgentContext(ToolContext, frozen=True, kw_only=True):
    """The context of a call within a run: an agent that is called as a tool keeps its own run in the same ledger."""

    ledger: Ledger | None = None


class Agent:
    """A model at work. `base_url` is a server of the Responses API; `transport` is any other way to one.

    `output_type` is what the final answer is read into. `state` is where the conversation is kept between turns: with
    us, or on the server as long as that remembers it. `hooks` are called with every event of every run.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        transport: Transport | None = None,
        name: str = "agent",
        instructions: str | None = None,
        tools: Sequence[Tool] = (),
        output_type: Any = None,
        limits: Limits | None = None,
        prices: Prices | None = None,
        state: Literal["client", "server"] = "client",
        settings: Mapping[str, Any] | None = None,
        hooks: Sequence[Callable[[RunEvent], object]] = (),
        turn_retries: int = 2,
    ) -> None:
        self.name = name
        self._transport = transport or self._connect(base_url, api_key)
        self._tools = [_require_tool(each) for each in tools]
        self._executor = Executor(self._tools)
        output = None if output_type is None else _Output(output_type, name)
        self._task = Task(
            limits=limits or Limits(),
            prices=prices,
            output=output.shape if output is not None else None,
            turn_retries=turn_retries,
        )
        if self._task.limits.cost is not None and prices is None:
            raise ConfigError("A limit of cost needs prices.")
        self._unwrap = output.unwrap if output is not None else None
        self._settings = {"model": model, **(settings or {})}
        if instructions is not None:
            self._settings["instructions"] = instructions
        if output is not None:
            self._settings["text"] = {**self._settings.get("text", {}), "format": output.format}
        self._state = state
        self._hooks = hooks

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        if base_url is None:
            raise ConfigError("An agent needs a base_url or a transport.")
        return HttpTransport(base_url, api_key=api_key)

    async def close(self) -> None:
        await self._transport.close()

    async def run(
        self,
        task: Input,
        *,
        history: Sequence[JsonObject] = (),
        durable: Ledger | None = None,
        run_id: str | None = None,
        cancel: asyncio.Event | None = None,
    ) -> Outcome:
        """Work on a task to the end, and say what came of it."""
        return await _drain(self.run_stream(task, history=history, durable=durable, run_id=run_id, cancel=cancel))

    def run_sync(self, task: Input, **options: Any) -> Outcome:
        """The same for code that is not asynchronous."""
        return asyncio.run(self._run_and_close(self.run, task, **options))

    async def run_stream(
        self,
        task: Input,
        *,
        history: Sequence[JsonObject] = (),
        durable: Ledger | None = None,
        run_id: str | None = None,
        cancel: asyncio.Event | None = None,
    ) -> RunEvents:
        """Work on a task and tell what happens. With a ledger in `durable`, another process can go on with it.

        Closing the stream, or cancelling who reads it, cancels the run. `cancel` does too, with an outcome.
        """
        journal = Journal(run_id or f"run_{int(time.time() * 1000):x}{secrets.token_hex(8)}", ledger=durable)
        asked = [{"role": "user", "content": task}] if isinstance(task, str) else list(task)
        try:
            await journal.write(Began(self.name, [*history, *asked], time.time()))
        except EntryTaken:
            raise InvalidRequest(
                f"There is a run with id '{journal.run_id}' already: resume it.", param="run_id", code="run_exists"
            ) from None
        async with aclosing(self._events(journal, durable, cancel)) as events:
            async for event in events:
                yield event

    async def resume(
        self,
        run: str | bytes,
        *,
        approvals: Mapping[str, Verdict] | None = None,
        durable: Ledger | None = None,
        cancel: asyncio.Event | None = None,
    ) -> Outcome:
        """Go on with a run: by its id in the ledger, or by the `state` of its outcome."""
        return await _drain(self.resume_stream(run, approvals=approvals, durable=durable, cancel=cancel))

    def resume_sync(self, run: str | bytes, **options: Any) -> Outcome:
        return asyncio.run(self._run_and_close(self.resume, run, **options))

    async def resume_stream(
        self,
        run: str | bytes,
        *,
        approvals: Mapping[str, Verdict] | None = None,
        durable: Ledger | None = None,
        cancel: asyncio.Event | None = None,
    ) -> RunEvents:
        """Go on with a run, and tell what happens. `approvals` say which of its pending calls may be made."""
        journal = await _open(run, durable)
        for call_id, verdict in (approvals or {}).items():
            if call_id not in {call.call_id for call in journal.state.open} or call_id in journal.state.judged:
                raise InvalidRequest(f"No call '{call_id}' waits for approval in this run.", param="approvals")
            approved = verdict is True
            await journal.write(Judged(call_id, approved, verdict if isinstance(verdict, str) else ""))
        async with aclosing(self._events(journal, durable, cancel)) as events:
            async for event in events:
                yield event

    def as_tool(self, name: str, description: str) -> Tool:
        """This agent as a tool of another: it works on one input within its own limits, and gives its answer."""
        return Tool(
            name=name,
            description=description,
            parameters={
                "type": "object",
                "properties": {"input": {"type": "string", "description": "What to work on, with all it needs."}},
                "required": ["input"],
                "additionalProperties": False,
            },
            invoke=self._work_for,
            # Its own run knows what it has done already.
            on_interrupt="retry",
        )

    async def _work_for(self, arguments: str, context: ToolContext) -> ToolResult:
        asked = msgspec.json.decode(arguments, type=_Asked).input
        ledger = context.ledger if isinstance(context, AgentContext) else None
        run_id = f"{context.run_id}.{context.call_id}"
        if ledger is not None and await ledger.read(run_id):
            outcome = await self.resume(run_id, durable=ledger)
        else:
            outcome = await self.run(asked, durable=ledger, run_id=run_id)
        if outcome.kind == "final":
            return ToolResult(outcome.text)
        reason = outcome.error.message if outcome.error is not None else outcome.text
        return fail(f"The agent ended with {outcome.kind}: {reason}")

    async def _events(self, journal: Journal, ledger: Ledger | None, cancel: asyncio.Event | None) -> RunEvents:
        model = ResponsesModel(
            self._transport,
            settings=self._settings,
            tools=[each.describe() for each in self._tools],
            state=self._state,
        )
        context = functools.partial(AgentContext, ledger=ledger)
        loop = Loop(journal, model, self._executor, self._task, make_context=context, cancel=cancel)
        async with aclosing(loop.events()) as events:
            async for event in events:
                told = self._present(event) if isinstance(event, RunEnded) else event
                self._notify(told)
                yield told

    def _present(self, ended: RunEnded) -> RunEnded:
        if self._unwrap is None or ended.outcome.kind != "final":
            return ended
        outcome = msgspec.structs.replace(ended.outcome, output=self._unwrap(ended.outcome.output))
        return RunEnded(ended.run_id, outcome)

    def _notify(self, event: RunEvent) -> None:
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:
                logger.exception("a hook of the agent %s failed", self.name)

    async def _run_and_close(self, run: Callable[..., Any], *arguments: Any, **options: Any) -> Outcome:
        try:
            outcome: Outcome = await run(*arguments, **options)
            return outcome
        finally:
            await self.close()


class _Asked(msgspec.Struct):
    input: str


class _Output:
    """The form of the final answer. What is no object is put into one, because strict mode wants one at the top."""

    def __init__(self, kind: Any, name: str) -> None:
        shape = Shape(kind, where=f"{name}.output_type")
        self._wrapped = shape.schema.get("type") != "object"
        self.shape = shape
        if self._wrapped:
            holder = msgspec.defstruct("Output", [("value", kind)])
            self.shape = Shape(holder, where=f"{name}.output_type")
        self.format = {"type": "json_schema", "name": "output", "schema": self.shape.schema, "strict": True}

    def unwrap(self, value: Any) -> Any:
        return value.value if self._wrapped else value


def _require_tool(tool: Tool) -> Tool:
    if not isinstance(tool, Tool):
        name = getattr(tool, "__name__", repr(tool))
        raise ConfigError(f"{name} is not a tool: decorate it with @tool.")
    return tool


async def _open(run: str | bytes, ledger: Ledger | None) -> Journal:
    if isinstance(run, bytes):
        journal = unpack(run)
        # With a ledger, that is where the run is: the state only says which one.
        return journal if ledger is None else await load(journal.run_id, ledger)
    if ledger is None:
        raise InvalidRequest("A run is resumed by its id with the ledger it is in.", param="durable")
    return await load(run, ledger)


async def _drain(events: AsyncGenerator[RunEvent, None]) -> Outcome:
    outcome: Outcome | None = None
    async with aclosing(events):
        async for event in events:
            if isinstance(event, RunEnded):
                outcome = event.outcome
    assert outcome is not None, "a run ends by saying how"
    return outcome
