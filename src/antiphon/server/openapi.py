"""The OpenAPI document, made from the routes and the types that their handlers decode and encode."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec

from antiphon.entry_points import find_own_version
from antiphon.errors import (
    AntiphonError,
    BodyTooLarge,
    InsufficientScope,
    InvalidApiKey,
    InvalidRequest,
    NotFound,
    OriginNotAllowed,
    ServerError,
)
from antiphon.protocol.codec import EVENTS
from antiphon.protocol.unions import union_field
from antiphon.server.error_response import ErrorBody
from antiphon.server.http import HttpRequest
from antiphon.server.router import Operation, RouteEntry, Router
from antiphon.server.schemas import Components, Schema

Document = dict[str, Any]

_DESCRIPTION = """\
The Responses API on any model.

Every path with GET also supports HEAD, and every path supports OPTIONS. Other methods get status 405, and paths that \
are not listed here get 404, both with the standard error body. Unknown fields and query parameters are ignored and \
listed in the header `x-antiphon-warnings`."""
_RESPONSE_STREAM = (
    "The schema of each server-sent event. Its name is the `type` of its data. The last event is `[DONE]`. On an idle "
    "stream, events of type `keepalive` repeat the last sequence number."
)
_NAMED_STREAM = (
    "The schema of each server-sent event, by its name. On an idle stream, events named `keepalive` are sent. Clients "
    "can ignore them."
)
_UPGRADE = (
    "The connection becomes a WebSocket. Each client message is the body of a POST request to this path with "
    "`type: response.create`, or a `response.steer`. Each server message is a stream event."
)
_HEADERS = {
    "x-request-id": "The request id: the id that the client sent, if it is valid, or a new one.",
    "openai-processing-ms": "The time until the response started, in milliseconds.",
    "x-antiphon-warnings": "Warnings, for example about ignored fields. Absent without warnings.",
    "x-antiphon-served-by": "The backend and the model that serve the response, if known when the headers are sent.",
}
_SECURITY_SCHEME = "bearer"
_EVENT = union_field(lambda: EVENTS)
_PARAMETER = re.compile(r"\{(\w+)(\.\.\.)?\}")
_NULL = {"type": "null"}


class OpenApiHandler:
    """Responds with the document. It is made on the first request, and again if the server begins to require a key."""

    operations: ClassVar[dict[str, Operation]] = {
        "show": Operation(id="getDocument", summary="Get this document.", response_type=dict[str, Any])
    }

    def __init__(self, router: Router, *, requires_key: Callable[[], bool]) -> None:
        self._router = router
        self._requires_key = requires_key
        self._documents: dict[bool, bytes] = {}
        self._lock = asyncio.Lock()

    async def show(self, http_request: HttpRequest) -> None:
        async with self._lock:
            requires_key = self._requires_key()
            if requires_key not in self._documents:  # making it takes about 0.2 seconds
                self._documents[requires_key] = await asyncio.to_thread(self._make, requires_key=requires_key)
        await http_request.respond(200, self._documents[requires_key])

    def _make(self, *, requires_key: bool) -> bytes:
        return msgspec.json.encode(make_openapi_document(self._router, requires_key=requires_key))


def make_openapi_document(router: Router, *, requires_key: bool) -> Document:
    """Return the document of all operations of a router."""
    routes = [(entry, operation) for entry in router.entries if (operation := _find_operation(entry)) is not None]
    components = _collect_components([operation for _, operation in routes])
    paths: dict[str, dict[str, Any]] = {}
    statuses: dict[int, Document] = {}
    for entry, operation in routes:
        errors = {error.status: error for error in _list_errors(entry, operation, requires_key=requires_key)}
        statuses |= {status: _describe_error(status, components) for status in errors}
        path = _PARAMETER.sub(r"{\1}", entry.path)
        described = _describe_operation(entry, operation, components, requires_key=requires_key)
        described["responses"] |= {
            str(status): _refer("responses", str(status))
            if operation.error_type is None
            else _describe_error(status, components, operation.error_type)
            for status in sorted(errors)
        }
        paths.setdefault(path, {})[entry.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Antiphon", "version": find_own_version(), "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components.schemas,
            "responses": {str(status): statuses[status] for status in sorted(statuses)},
            "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()},
            "securitySchemes": {_SECURITY_SCHEME: {"type": "http", "scheme": "bearer"}},
        },
    }


def _find_operation(entry: RouteEntry) -> Operation | None:
    return entry.operation() if callable(entry.operation) else entry.operation


def _collect_components(operations: Sequence[Operation]) -> Components:
    sent = [ErrorBody, *(operation.response_type for operation in operations if operation.response_type is not None)]
    sent += [event for operation in operations for event in operation.event_types.values()]
    if any(operation.streams and not operation.event_types for operation in operations):
        sent.append(_EVENT)
    return Components(
        read=[operation.body_type for operation in operations if operation.body_type is not None], sent=sent
    )


def _list_errors(entry: RouteEntry, operation: Operation, *, requires_key: bool) -> Iterator[type[AntiphonError]]:
    yield from (InvalidRequest, ServerError)
    if requires_key and not entry.public:
        yield from (InvalidApiKey, InsufficientScope)
    elif not entry.public:
        yield OriginNotAllowed
    if "{" in entry.path:
        yield NotFound
    if operation.body_type is not None:
        yield BodyTooLarge
    yield from operation.errors


def _describe_error(status: int, components: Components, error_type: Any = None) -> Document:
    """Describe an error response. Errors before the handler, such as a missing key, have the standard body."""
    schema = components.describe(ErrorBody)
    if error_type is not None:
        schema = {"anyOf": [components.describe(error_type), schema]}
    return {
        "description": HTTPStatus(status).phrase,
        "headers": _refer_headers(),
        "content": {"application/json": {"schema": schema}},
    }


def _describe_operation(
    entry: RouteEntry, operation: Operation, components: Components, *, requires_key: bool
) -> Document:
    described: Document = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [entry.path.split("/")[2] if entry.path.startswith("/v1/") else "server"],
        "security": _describe_security(entry, requires_key=requires_key),
        "parameters": [*_describe_path(entry.path), *_describe_query(operation)],
        "responses": _describe_success(operation, components),
    }
    if operation.body_type is not None:
        schema = components.describe(operation.body_type, read=True)
        kind = "application/json"
        if operation.file_field:
            kind, schema = "multipart/form-data", _add_file(schema, operation.file_field)
        described["requestBody"] = {"required": not operation.optional_body, "content": {kind: {"schema": schema}}}
    return described


def _describe_success(operation: Operation, components: Components) -> Document:
    if operation.returns_file:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        return {"200": {"description": "The content.", "headers": _refer_headers(), "content": content}}
    if operation.response_type is None:
        return {"101": {"description": _UPGRADE}}
    return {"200": _describe_response(operation, components)}


def _add_file(schema: Schema, name: str) -> Schema:
    """Return the schema of a form with these fields and a file."""
    file = {"type": "object", "properties": {name: {"type": "string", "format": "binary"}}, "required": [name]}
    return {"allOf": [schema, file]}


def _describe_security(entry: RouteEntry, *, requires_key: bool) -> list[Document]:
    if entry.public:
        return []
    # An empty requirement makes the key optional: clients that always send one are accepted.
    return [{_SECURITY_SCHEME: []}] if requires_key else [{}, {_SECURITY_SCHEME: []}]


def _describe_path(path: str) -> Iterator[Document]:
    for name, dots in _PARAMETER.findall(path):
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        yield parameter | ({"description": "May contain slashes."} if dots else {})


def _describe_query(operation: Operation) -> Iterator[Document]:
    if operation.query_type is not None:
        _, schemas = msgspec.json.schema_components([operation.query_type])
        schema = schemas[operation.query_type.__name__]
        for name, field in schema["properties"].items():
            yield {"name": name, "in": "query", "schema": _without_null(field)}


def _without_null(field: Schema) -> Schema:
    """Return the schema without null, which a query parameter cannot be."""
    forms = [form for form in field.get("anyOf", [field]) if form != _NULL]
    default = {"default": field["default"]} if field.get("default") is not None else {}
    return {**(forms[0] if len(forms) == 1 else {"anyOf": forms}), **default}


def _describe_response(operation: Operation, components: Components) -> Document:
    content: Document = {"application/json": {"schema": components.describe(operation.response_type)}}
    if operation.streams:
        schema = (
            _describe_named_events(operation, components)
            if operation.event_types
            else _describe_response_events(components)
        )
        content["text/event-stream"] = {"schema": schema}
    return {"description": "The response.", "headers": _refer_headers(), "content": content}


def _describe_response_events(components: Components) -> Schema:
    """Return the schema of one event. Before OpenAPI 3.2 the schema of a stream describes each of its events."""
    event = components.describe(_EVENT)
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
    return {
        "description": _RESPONSE_STREAM,
        "type": "object",
        "anyOf": [
            {"properties": {"event": {"type": "string"}, "data": data}, "required": ["event", "data"]},
            {"properties": {"data": {"const": "[DONE]"}}, "required": ["data"]},
        ],
    }


def _describe_named_events(operation: Operation, components: Components) -> Schema:
    forms = [
        {
            "properties": {
                "event": {"const": name},
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": components.describe(kind),
                },
            },
            "required": ["event", "data"],
        }
        for name, kind in operation.event_types.items()
    ]
    return {
        "description": _NAMED_STREAM,
        "type": "object",
        "anyOf": [*forms, {"properties": {"event": {"const": "keepalive"}}}],
    }


def _refer_headers() -> Document:
    return {name: _refer("headers", name) for name in _HEADERS}


def _refer(section: str, name: str) -> Document:
    return {"$ref": f"#/components/{section}/{name}"}
