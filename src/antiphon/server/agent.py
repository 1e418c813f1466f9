"""The handler of /v1/agent/execute: one turn of an agent, with the tools of this server."""

import logging
from contextlib import aclosing
from typing import ClassVar

import msgspec

from antiphon.agent.execute.envelope import (
    AgentExecuteResponse,
    ConversationContext,
    Envelope,
    decode,
    encode,
    list_unknown,
)
from antiphon.agent.execute.execution import Execution, make_error_envelope
from antiphon.agent.execute.wire import AgentExecuteBody, Progress
from antiphon.agent.transports.engine import LocalTransport
from antiphon.config.settings import Settings
from antiphon.engine.background.responses import BackgroundRun
from antiphon.engine.engine import Engine
from antiphon.engine.respond.run import Run
from antiphon.errors import (
    AntiphonError,
    ConfigError,
    NotFound,
    PreviousResponseNotFound,
    RateLimited,
    ServerError,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol import codec
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.server.disconnect_watch import DisconnectWatch
from antiphon.server.error_response import find_error_status, make_internal_error
from antiphon.server.http import ClientDisconnected, HttpRequest
from antiphon.server.keepalive import Keepalive, encode_keepalive
from antiphon.server.request_body import read_json_body
from antiphon.server.router import Operation
from antiphon.tools.base import Tool
from antiphon.tools.executor import Executor
from antiphon.tools.loading import load_tools

logger = logging.getLogger(__name__)

_EVENTS: dict[str, type[Envelope]] = {"progress": Progress, "result": AgentExecuteResponse}


class WarningCollectingEngine:
    """An engine that collects the warnings of the responses it creates. Their usage is counted for one key."""

    def __init__(self, engine: Engine, *, key_id: str) -> None:
        self._engine = engine
        self._key_id = key_id
        self.warnings: list[str] = []

    async def create(self, request: CreateRequest, *, project: str) -> Run | BackgroundRun:
        run = await self._engine.create(request, project=project, key_id=self._key_id)
        self.warnings += run.warnings
        return run


class AgentHandlers:
    """One method per operation on agents."""

    operations: ClassVar[dict[str, Operation]] = {
        "execute": Operation(
            id="executeAgent",
            summary="Execute one turn of an agent with the tools of the server and the client.",
            body_type=AgentExecuteBody,
            response_type=AgentExecuteResponse,
            streams=True,
            event_types=_EVENTS,
            errors=(NotFound, RateLimited, UpstreamError, Unavailable, UpstreamTimeout),
            error_type=AgentExecuteResponse,
        )
    }

    def __init__(self, engine: Engine, settings: Settings, *, keepalive: Keepalive) -> None:
        self._engine = engine
        self._settings = settings
        self._keepalive = keepalive
        self._tools = load_agent_tools(settings)

    async def execute(self, http_request: HttpRequest) -> None:
        """Execute a turn. On any error respond with an envelope that describes it, and with the status of the error."""
        body: AgentExecuteBody | None = None
        try:
            body = await read_json_body(http_request, _decode_body, self._settings)
            http_request.stream = _wants_stream(http_request, body)
            with DisconnectWatch(http_request):
                envelope, error = await self._run(http_request, body)
        except ClientDisconnected:
            raise
        except Exception as failure:
            error = _as_antiphon_error(failure, http_request)
            envelope = encode(make_error_envelope(error, body))
        if http_request.status:
            http_request.error_code = None if error is None else error.code or error.type
            await http_request.finish(_encode_event("result", envelope))
        elif error is not None:
            status = error.status if error.status != ServerError.status else find_error_status(error.type, error.code)
            await http_request.respond_error(error, status=status, body=envelope)
        elif http_request.stream:
            await http_request.finish(_encode_event("result", envelope))
        else:
            await http_request.respond(200, envelope)

    async def _run(self, http_request: HttpRequest, body: AgentExecuteBody) -> tuple[bytes, AntiphonError | None]:
        """Execute the turn and send its progress if the client streams. Return the encoded envelope and the error."""
        engine = WarningCollectingEngine(self._engine, key_id=http_request.key_id)
        execution = Execution(
            body,
            transport=LocalTransport(engine, project=http_request.project),
            defaults=self._make_defaults(),
            tools=self._tools,
            previous=await self._find_previous(http_request.project, body.response_continuation_id),
        )
        with self._keepalive.watch(http_request, encode_keepalive) as activity:
            async with aclosing(execution.events()) as events:
                async for event in events:
                    if isinstance(event, AgentExecuteResponse):
                        event.warnings = [*event.warnings, *dict.fromkeys(engine.warnings)]
                        http_request.model, http_request.response_id = event.model_id, event.response_continuation_id
                        return encode(event), execution.error
                    if http_request.stream:
                        activity.last_event = 0
                        await http_request.write(_encode_event("progress", encode(event)))
        raise ServerError("The turn ended without a result.")

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


def _as_antiphon_error(failure: Exception, http_request: HttpRequest) -> AntiphonError:
    if isinstance(failure, AntiphonError):
        return failure
    logger.error("the agent turn failed", exc_info=failure, extra={"request_id": http_request.id})
    return make_internal_error(http_request.id)


def load_agent_tools(settings: Settings) -> list[Tool]:
    """Load the tools that the server runs. Raises ConfigError for tools that cannot run here."""
    try:
        tools = load_tools(settings.agent_tools)
        Executor(tools)  # checks that their names do not clash
    except ConfigError as error:
        raise ConfigError(f"agent_tools: {error.message}") from None
    for tool in tools:
        if tool.needs_approval:
            raise ConfigError(f"agent_tools: the tool '{tool.name}' needs approval, and a server cannot ask for it.")
    return tools


def _decode_body(raw: bytes) -> codec.Decoded[AgentExecuteBody]:
    """Return the body, and its unknown fields, which are ignored."""
    return codec.Decoded(decode(raw, AgentExecuteBody), tuple(list_unknown(raw, AgentExecuteBody)))


def _wants_stream(http_request: HttpRequest, body: AgentExecuteBody) -> bool:
    if body.stream is not None:
        return body.stream
    accepted = http_request.headers.get(b"accept", b"")
    return b"text/event-stream" in accepted and b"application/json" not in accepted


def _encode_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
