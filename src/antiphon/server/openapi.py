"""The OpenAPI document: the routes, told in the words of the types that their handlers decode and encode."""

import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec

from antiphon.errors import (
    AntiphonError,
    BodyTooLarge,
    InvalidApiKey,
    InvalidRequest,
    NotFound,
    OriginNotAllowed,
    ServerError,
)
from antiphon.protocol.codec import EVENTS
from antiphon.protocol.unions import union_field
from antiphon.server.error_response import ErrorBody
from antiphon.server.http import Exchange
from antiphon.server.router import Entry, Operation, Router
from antiphon.server.schemas import Components, Schema

Document = dict[str, Any]

_ABOUT = """\
The Responses API on any model.

Every path that answers to GET answers to HEAD, and every path to OPTIONS. Any other method gets the status 405, and a \
path that is not listed here 404, both with an error in the usual shape. Fields and query parameters that the server \
does not know are accepted, left aside, and listed in the header `x-antiphon-warnings`."""
_STREAM = (
    "What each of the server-sent events is: its name is the `type` of its data. The last one is `[DONE]`. A silent "
    "stream carries events of the type `keepalive`, which repeat the last number."
)
_EVENTS = (
    "What each of the server-sent events is, by its name. A silent stream carries events of the name `keepalive`, "
    "which mean nothing more."
)
_SWITCH = (
    "The connection is a WebSocket now. Each message of the client is the body of a POST request to this path with "
    "`type: response.create`, or a `response.steer`; each message of the server is an event of a stream."
)
_HEADERS = {
    "x-request-id": "The request's id: the client's own, if it sent one that fits into a header.",
    "openai-processing-ms": "The time until the answer began, in milliseconds.",
    "x-antiphon-warnings": "What was left aside or repaired, if anything was.",
    "x-antiphon-served-by": "Which backend answers with which model, if that is known by then.",
}
_KEY = "bearer"
_EVENT = union_field(lambda: EVENTS)
_PARAMETER = re.compile(r"\{(\w+)(\.\.\.)?\}")
_NULL = {"type": "null"}


class DocumentHandler:
    """Answers with the document, which is made when somebody first asks for it."""

    def __init__(self, router: Router, *, guarded: bool) -> None:
        self._router = router
        self._guarded = guarded
        self._document: bytes | None = None

    async def show(self, exchange: Exchange) -> None:
        if self._document is None:
            self._document = msgspec.json.encode(make_document(self._router, guarded=self._guarded))
        await exchange.answer(200, self._document)


def make_document(router: Router, *, guarded: bool) -> Document:
    """The document of all that the router leads to. A server is guarded if it has keys; others need none."""
    routes = [(entry, entry.operation) for entry in router.entries if entry.operation is not None]
    components = _gather([operation for _, operation in routes])
    paths: dict[str, dict[str, Any]] = {}
    statuses: dict[int, Document] = {}
    for entry, operation in routes:
        errors = {error.status: error for error in _list_errors(entry, operation, guarded=guarded)}
        statuses |= {status: _describe_error(status, components) for status in errors}
        path = _PARAMETER.sub(r"{\1}", entry.path)
        described = _describe_operation(entry, operation, components, guarded=guarded)
        described["responses"] |= {
            str(status): _refer("responses", str(status))
            if operation.failure is None
            else _describe_error(status, components, operation.failure)
            for status in sorted(errors)
        }
        paths.setdefault(path, {})[entry.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Antiphon", "version": version("antiphon"), "description": _ABOUT},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components.schemas,
            "responses": {str(status): statuses[status] for status in sorted(statuses)},
            "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()},
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _gather(operations: Sequence[Operation]) -> Components:
    sent = [ErrorBody, *(operation.answer for operation in operations if operation.answer is not None)]
    sent += [event for operation in operations for event in operation.events.values()]
    if any(operation.streams and not operation.events for operation in operations):
        sent.append(_EVENT)
    return Components(read=[operation.body for operation in operations if operation.body is not None], sent=sent)


def _list_errors(entry: Entry, operation: Operation, *, guarded: bool) -> Iterator[type[AntiphonError]]:
    yield from (InvalidRequest, ServerError)
    if guarded and not entry.public:
        yield InvalidApiKey
    elif not entry.public:
        yield OriginNotAllowed
    if "{" in entry.path:
        yield NotFound
    if operation.body is not None:
        yield BodyTooLarge
    yield from operation.errors


def _describe_error(status: int, components: Components, failure: Any = None) -> Document:
    """One that the handler did not see, as a missing key, has the usual body in any case."""
    schema = components.describe(ErrorBody)
    if failure is not None:
        schema = {"anyOf": [components.describe(failure), schema]}
    return {
        "description": HTTPStatus(status).phrase,
        "headers": _refer_headers(),
        "content": {"application/json": {"schema": schema}},
    }


def _describe_operation(entry: Entry, operation: Operation, components: Components, *, guarded: bool) -> Document:
    described: Document = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [entry.path.split("/")[2] if entry.path.startswith("/v1/") else "server"],
        "security": _describe_security(entry, guarded=guarded),
        "parameters": [*_describe_path(entry.path), *_describe_query(operation)],
        "responses": {"101": {"description": _SWITCH}}
        if operation.answer is None
        else {"200": _describe_answer(operation, components)},
    }
    if operation.body is not None:
        schema = components.describe(operation.body, read=True)
        described["requestBody"] = {
            "required": not operation.optional_body,
            "content": {"application/json": {"schema": schema}},
        }
    return described


def _describe_security(entry: Entry, *, guarded: bool) -> list[Document]:
    if entry.public:
        return []
    # An empty requirement among others makes the key optional: clients that must send one may.
    return [{_KEY: []}] if guarded else [{}, {_KEY: []}]


def _describe_path(path: str) -> Iterator[Document]:
    for name, dots in _PARAMETER.findall(path):
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        yield parameter | ({"description": "It may contain slashes."} if dots else {})


def _describe_query(operation: Operation) -> Iterator[Document]:
    if operation.query is not None:
        _, schemas = msgspec.json.schema_components([operation.query])
        schema = schemas[operation.query.__name__]
        for name, field in schema["properties"].items():
            yield {"name": name, "in": "query", "schema": _without_null(field)}


def _without_null(field: Schema) -> Schema:
    """What a text in a query can be: never null."""
    forms = [form for form in field.get("anyOf", [field]) if form != _NULL]
    default = {"default": field["default"]} if field.get("default") is not None else {}
    return {**(forms[0] if len(forms) == 1 else {"anyOf": forms}), **default}


def _describe_answer(operation: Operation, components: Components) -> Document:
    content: Document = {"application/json": {"schema": components.describe(operation.answer)}}
    if operation.streams:
        schema = _describe_events(operation, components) if operation.events else _describe_stream(components)
        content["text/event-stream"] = {"schema": schema}
    return {"description": "The answer.", "headers": _refer_headers(), "content": content}


def _describe_stream(components: Components) -> Schema:
    """Up to OpenAPI 3.2, which has another place for it, the schema of a stream is that of each event."""
    event = components.describe(_EVENT)
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
    return {
        "description": _STREAM,
        "type": "object",
        "anyOf": [
            {"properties": {"event": {"type": "string"}, "data": data}, "required": ["event", "data"]},
            {"properties": {"data": {"const": "[DONE]"}}, "required": ["data"]},
        ],
    }


def _describe_events(operation: Operation, components: Components) -> Schema:
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
        for name, kind in operation.events.items()
    ]
    return {
        "description": _EVENTS,
        "type": "object",
        "anyOf": [*forms, {"properties": {"event": {"const": "keepalive"}}}],
    }


def _refer_headers() -> Document:
    return {name: _refer("headers", name) for name in _HEADERS}


def _refer(section: str, name: str) -> Document:
    return {"$ref": f"#/components/{section}/{name}"}
