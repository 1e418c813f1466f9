"""The handler of /v1/agent/execute: a turn of an agent, with the tools that run here."""

import logging
from contextlib import aclosing

import msgspec

from antiphon.agent.execute.envelope import (
    AgentExecuteResponse,
    ConversationContext,
    Envelope,
    decode,
    encode,
    list_unknown,
)
from antiphon.agent.execute.execution import Execution, describe_error
from antiphon.agent.execute.wire import AgentExecuteBody, Progress
from antiphon.agent.transports.engine import LocalTransport
from antiphon.config import Settings
from antiphon.engine.background.queue import BackgroundRun
from antiphon.engine.engine import Engine
from antiphon.engine.respond.run import Run
from antiphon.errors import AntiphonError, ConfigError, NotFound, PreviousResponseNotFound, ServerError
from antiphon.protocol import codec
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.server.error_response import find_status
from antiphon.server.http import ClientGone, Exchange, Watch, read_body
from antiphon.server.keepalive import Keepalive
from antiphon.tools.base import Tool
from antiphon.tools.executor import Executor
from antiphon.tools.loading import load_tools

logger = logging.getLogger(__name__)

EVENTS: dict[str, type[Envelope]] = {"progress": Progress, "result": AgentExecuteResponse}


class AttentiveEngine:
    """The engine, and what it has warned of."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.warnings: list[str] = []

    async def create(self, request: CreateRequest, *, project: str) -> Run | BackgroundRun:
        run = await self._engine.create(request, project=project)
        self.warnings += run.warnings
        return run


class AgentHandlers:
    """One method: the turn's whole life is in the envelope."""

    def __init__(self, engine: Engine, settings: Settings, *, keepalive: Keepalive) -> None:
        self._engine = engine
        self._settings = settings
        self._keepalive = keepalive
        self._tools = choose_tools(settings)

    async def execute(self, exchange: Exchange) -> None:
        """Whatever goes wrong, the client gets an envelope that says so, with the status of the error."""
        asked: AgentExecuteBody | None = None
        try:
            body = await read_body(exchange, self._settings.max_body_bytes)
            asked = decode(body, AgentExecuteBody)
            exchange.note_ignored(list_unknown(body, AgentExecuteBody))
            exchange.stream = _wants_stream(exchange, asked)
            with Watch(exchange):
                ending, error = await self._run(exchange, asked)
        except ClientGone:
            raise
        except Exception as failure:
            error = _as_refusal(failure, exchange)
            ending = encode(describe_error(error, asked))
        if exchange.status:
            exchange.error_code = None if error is None else error.code or error.type
            await exchange.finish(_encode_event("result", ending))
        elif error is not None:
            status = error.status if error.status != ServerError.status else find_status(error.type, error.code)
            await exchange.answer_error(error, status=status, body=ending)
        elif exchange.stream:
            await exchange.finish(_encode_event("result", ending))
        else:
            await exchange.answer(200, ending)

    async def _run(self, exchange: Exchange, asked: AgentExecuteBody) -> tuple[bytes, AntiphonError | None]:
        """Execute the turn, and tell of it as it goes if the client wants that. Gives the envelope, encoded."""
        engine = AttentiveEngine(self._engine)
        execution = Execution(
            asked,
            transport=LocalTransport(engine, project=exchange.project),
            defaults=self._make_defaults(),
            tools=self._tools,
            previous=await self._find_previous(exchange.project, asked.response_continuation_id),
        )
        with self._keepalive.watch(exchange) as pulse:
            async with aclosing(execution.events()) as events:
                async for event in events:
                    if isinstance(event, AgentExecuteResponse):
                        event.warnings = [*event.warnings, *dict.fromkeys(engine.warnings)]
                        exchange.model, exchange.response_id = event.model_id, event.response_continuation_id
                        return encode(event), execution.error
                    if exchange.stream:
                        pulse.last = 0
                        await exchange.write(_encode_event("progress", encode(event)))
        raise ServerError("The turn came to no end.")

    async def _find_previous(self, project: str, response_id: str | None) -> JsonObject | None:
        if response_id is None or not response_id.strip():
            return None
        try:
            response = await self._engine.retrieve(project, response_id)
        except NotFound:
            raise PreviousResponseNotFound(
                f"Previous response with id '{response_id}' not found.", param="ResponseContinuationId"
            ) from None
        return msgspec.json.decode(codec.encode(response), type=JsonObject)

    def _make_defaults(self) -> ConversationContext:
        models = self._engine.models()
        return ConversationContext(
            model_name=self._settings.agent_model or (models[0].id if models else ""),
            temperature=self._settings.agent_temperature,
            system=self._settings.agent_system,
        )


def _as_refusal(failure: Exception, exchange: Exchange) -> AntiphonError:
    if isinstance(failure, AntiphonError):
        return failure
    logger.error("the turn failed", exc_info=failure, extra={"request_id": exchange.id})
    return ServerError(f"The server had an error. The request id is {exchange.id}.")


def choose_tools(settings: Settings) -> list[Tool]:
    """The tools that the server runs. Raises ConfigError for those that it cannot."""
    try:
        tools = load_tools(settings.agent_tools)
        Executor(tools)  # which knows whether they can stand side by side
    except ConfigError as error:
        raise ConfigError(f"agent_tools: {error.message}") from None
    for tool in tools:
        if tool.needs_approval:
            raise ConfigError(f"agent_tools: the tool '{tool.name}' needs approval, and nobody can give it here.")
    return tools


def _wants_stream(exchange: Exchange, asked: AgentExecuteBody) -> bool:
    if asked.stream is not None:
        return asked.stream
    accepted = exchange.headers.get(b"accept", b"")
    return b"text/event-stream" in accepted and b"application/json" not in accepted


def _encode_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
