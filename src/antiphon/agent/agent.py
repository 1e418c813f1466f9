"""An agent: a model with instructions, tools and limits, and the ways to run it."""

import asyncio
import functools
import inspect
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from antiphon.agent.budget import Budget, Share
from antiphon.agent.entries import Began, Judgement, Resumed
from antiphon.agent.history import Sealing, mend
from antiphon.agent.journal import Journal, load, unpack
from antiphon.agent.limits import Limits, Prices
from antiphon.agent.loop import Loop, RunEvents
from antiphon.agent.model import ResponsesModel
from antiphon.agent.outcome import Outcome, RunEnded, RunEvent
from antiphon.agent.subagents import AgentContext, Delegate, Verdict, judge
from antiphon.agent.task import Task, TypedOutput
from antiphon.agent.transports.base import Transport
from antiphon.errors import ConfigError, InvalidRequest
from antiphon.ledger import EntryTaken, Ledger
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import Tool
from antiphon.tools.executor import Executor

logger = logging.getLogger(__name__)

Input = str | Sequence[JsonObject]


class Agent:
    """A model at work. `base_url` is a server of the Responses API; `transport` is any other way to one.

    `output_type` is what the final answer is read into. `state` is where the conversation is kept between turns: with
    us, or on the server as long as that remembers it. `settings` are further parameters of every request. `hooks` are
    called with every event of every run.
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
        self._tools = [_require_tool(each) for each in tools]
        self._executor = Executor(self._tools)
        output = None if output_type is None else TypedOutput(output_type, where=f"{name}.output_type")
        self._task = Task(limits=limits or Limits(), prices=prices, output=output, turn_retries=turn_retries)
        if self._task.limits.cost is not None and prices is None:
            raise ConfigError("A limit of cost needs prices.")
        if state not in ("client", "server"):
            raise ConfigError(f"The state of a conversation is kept by the client or the server, not by {state!r}.")
        self._settings = {"model": model, **(settings or {})}
        if instructions is not None:
            self._settings["instructions"] = instructions
        if output is not None:
            self._settings["text"] = {**self._settings.get("text", {}), "format": output.format}
        self._state = state
        self._sealing = Sealing()
        self._hooks = hooks
        self._transport = transport or self._connect(base_url, api_key)

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        if base_url is None:
            raise ConfigError("An agent needs a base_url or a transport.")
        # An HTTP client takes longer to load than everything else here.
        from antiphon.agent.transports.http import HttpTransport

        return HttpTransport(base_url, api_key=api_key)

    async def close(self) -> None:
        """Release the connections, those of the agents among its tools too. The next run opens them anew."""
        await self._transport.close()
        for each in self._tools:
            if isinstance(each.invoke, Delegate):
                await each.invoke.agent.close()

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
        return self._run_alone(functools.partial(self.run, task, **options))

    def run_stream(
        self,
        task: Input,
        *,
        history: Sequence[JsonObject] = (),
        durable: Ledger | None = None,
        run_id: str | None = None,
        cancel: asyncio.Event | None = None,
        share: Share | None = None,
    ) -> RunEvents:
        """Work on a task and tell what happens. With a ledger in `durable`, another process can go on with it.

        Closing the stream, or cancelling who reads it, cancels the run. `cancel` does too, with an outcome. `share` is
        what a run that this one works for has to spare.
        """
        asked = _read_task(task)
        named = run_id or f"run_{int(time.time() * 1000):x}{secrets.token_hex(8)}"
        begin = functools.partial(self._begin, [*history, *asked], named, durable)
        return self._follow(begin, durable, cancel, share)

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
        return self._run_alone(functools.partial(self.resume, run, **options))

    def resume_stream(
        self,
        run: str | bytes,
        *,
        approvals: Mapping[str, Verdict] | None = None,
        durable: Ledger | None = None,
        cancel: asyncio.Event | None = None,
        share: Share | None = None,
    ) -> RunEvents:
        """Go on with a run, and tell what happens. `approvals` say which of its pending calls may be made.

        A run that has come to its end is told again, and nothing is done. Who comes second to one that somebody else
        has gone on with gets an error.
        """
        judged = [judge(call_id, verdict) for call_id, verdict in (approvals or {}).items()]
        return self._follow(functools.partial(_reopen, run, judged, durable), durable, cancel, share)

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
            invoke=Delegate(self),
            # Its own run knows what it has done already.
            on_interrupt="retry",
        )

    async def _begin(self, items: list[JsonObject], run_id: str, ledger: Ledger | None) -> Journal:
        _require_json(items)
        journal = Journal(run_id, ledger=ledger)
        try:
            await journal.write(Began(self.name, mend(items), time.time()))
        except EntryTaken:
            raise InvalidRequest(
                f"There is a run with id '{run_id}' already: resume it.", param="run_id", code="run_exists"
            ) from None
        return journal

    async def _follow(
        self,
        open_journal: Callable[[], Awaitable[Journal]],
        ledger: Ledger | None,
        cancel: asyncio.Event | None,
        share: Share | None,
    ) -> RunEvents:
        if ledger is not None and not hasattr(ledger, "append"):
            raise ConfigError(f"durable wants a ledger, such as SqliteLedger(path), not {type(ledger).__name__}.")
        journal = await open_journal()
        model = ResponsesModel(
            self._transport,
            settings=self._settings,
            tools=[each.describe() for each in self._tools],
            state=self._state,
            sealing=self._sealing,
        )
        budget = Budget(journal.state, self._task, share=share)
        context = functools.partial(AgentContext, journal=journal, ledger=ledger, budget=budget)
        loop = Loop(journal, model, self._executor, self._task, budget=budget, make_context=context, cancel=cancel)
        async with aclosing(loop.events()) as events:
            async for event in events:
                if self._hooks:
                    await self._notify(event)
                yield event

    async def _notify(self, event: RunEvent) -> None:
        for hook in self._hooks:
            try:
                told = hook(event)
                if inspect.isawaitable(told):
                    await told
            except Exception:
                logger.exception("a hook of the agent %s failed", self.name)

    def _run_alone(self, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._run_and_close(work))
        raise RuntimeError("There is an event loop here already: await the run instead.")

    async def _run_and_close(self, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """What is open belongs to the event loop, which ends with the run."""
        try:
            return await work()
        finally:
            await self.close()


def _read_task(task: Any) -> list[JsonObject]:
    if isinstance(task, str):
        return [{"role": "user", "content": task}]
    if not isinstance(task, Sequence) or not all(isinstance(item, dict) for item in task):
        raise InvalidRequest("A task is a text, or a list of items.", param="task")
    return list(task)


def _require_json(items: list[JsonObject]) -> None:
    try:
        msgspec.json.encode(items)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The task cannot be sent as JSON: {error}.", param="task") from None


def _require_tool(tool: Tool) -> Tool:
    if not isinstance(tool, Tool):
        name = getattr(tool, "__name__", repr(tool))
        raise ConfigError(f"{name} is not a tool: decorate it with @tool.")
    return tool


async def _reopen(run: str | bytes, judged: list[Judgement], ledger: Ledger | None) -> Journal:
    """The journal of a run, with what was said about its calls. From then on it is ours to go on with."""
    journal = await _find(run, ledger)
    for each in judged:
        if not journal.state.waits_for(each.call_id):
            raise InvalidRequest(f"No call '{each.call_id}' waits for approval in this run.", param="approvals")
    if journal.state.ended is None or journal.state.ended.kind not in ("final", "decision"):
        await journal.write(Resumed(time.time(), judged))
    return journal


async def _find(run: str | bytes, ledger: Ledger | None) -> Journal:
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
