"""The reference schemas of the API: Open Responses, OpenAI's OpenAPI document, and the types of OpenAI's SDK.

The two documents are not part of the project. They are read from the directory `shared/protocol` beside the repository,
or from the one that the environment variable REFERENCE_SCHEMAS names: `openresponses-openapi.json` and
`openai-openapi.json`. A reference without its document is not available. The SDK is a dependency of the tests.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema.exceptions import ValidationError, best_match

from support.schema_validator import SchemaValidator

Json = dict[str, Any]

DOCUMENTS = Path(os.environ.get("REFERENCE_SCHEMAS") or Path(__file__).parents[3] / "shared" / "protocol")
OPEN_RESPONSES = "open-responses"
OPENAI_DOCUMENT = "openai-document"
OPENAI_SDK = "openai-sdk"
_FILES = {OPEN_RESPONSES: "openresponses-openapi.json", OPENAI_DOCUMENT: "openai-openapi.json"}

# The schema of each kind of payload.
_OPEN_RESPONSES_KINDS = {
    "response": "ResponseResource",
    "event": "Event",
    "compaction": "CompactResource",
    "socket_error": "WebSocketErrorEvent",
}
_OPENAI_KINDS = {
    "response": "Response",
    "event": "ResponseStreamEvent",
    "compaction": "CompactResource",
    "error": "ErrorResponse",
    "response_items": "ResponseItemList",
    "input_tokens": "TokenCountsResource",
    "conversation": "ConversationResource",
    "deleted_conversation": "DeletedConversationResource",
    "conversation_items": "ConversationItemList",
    "conversation_item": "ConversationItem",
    "models": "ListModelsResponse",
    "model": "Model",
}


class Violation(NamedTuple):
    """A part of a payload that a reference does not allow.

    `path` starts with the kind of the payload, and names the type of tagged objects instead of their index:
    `response.output[message].content[output_text].logprobs`.
    `keyword` is the JSON Schema keyword; for a missing field, the path is the field's.
    """

    reference: str
    path: str
    keyword: str
    message: str

    def __str__(self) -> str:
        return f"{self.reference}: {self.path}: {self.keyword}: {self.message}"


class Reference:
    """A set of schemas. `kinds` maps a kind of payload to its schema."""

    def __init__(self, name: str, schemas: Json, kinds: Mapping[str, str]) -> None:
        self.name = name
        self.kinds = kinds
        self._schemas = {key: _Rewriter(schemas).rewrite(schema) for key, schema in schemas.items()}

    def find_violations(self, kind: str, payload: Any) -> Iterator[Violation]:
        """Yield the violations of a payload. A kind that the reference does not define has none."""
        if kind in self.kinds:
            for error in self._validator(self.kinds[kind]).iter_errors(payload):
                yield self._describe(kind, best_match([error]) or error, payload)

    @functools.cache  # noqa: B019  # references live as long as the process
    def _validator(self, schema: str) -> SchemaValidator:
        return SchemaValidator({"$ref": f"#/$defs/{schema}", "$defs": self._schemas})

    def _describe(self, kind: str, error: ValidationError, payload: Any) -> Violation:
        path = kind + _get_tag(payload)
        for step in error.absolute_path:
            payload = payload[step]
            tag = _get_tag(payload)
            path += (tag or "[*]") if isinstance(step, int) else f".{step}{tag}"
        if error.validator == "required":
            path += "." + error.message.split("'")[1]
        return Violation(self.name, path, str(error.validator), error.message[:300])


def _get_tag(value: Any) -> str:
    return f"[{value['type']}]" if isinstance(value, dict) and isinstance(value.get("type"), str) else ""


def list_references() -> list[Reference]:
    """Return the available references."""
    loaded = (_load_open_responses(), _load_openai_document(), _load_openai_sdk())
    return [reference for reference in loaded if reference is not None]


def is_available(name: str) -> bool:
    return name not in _FILES or (DOCUMENTS / _FILES[name]).is_file()


@functools.cache
def _load_open_responses() -> Reference | None:
    schemas = _read_document(OPEN_RESPONSES)
    if schemas is None:
        return None
    events = [{"$ref": f"#/components/schemas/{name}"} for name in schemas if name.endswith("StreamingEvent")]
    return Reference(OPEN_RESPONSES, {**schemas, "Event": {"oneOf": events}}, _OPEN_RESPONSES_KINDS)


@functools.cache
def _load_openai_document() -> Reference | None:
    schemas = _read_document(OPENAI_DOCUMENT)
    return None if schemas is None else Reference(OPENAI_DOCUMENT, schemas, _OPENAI_KINDS)


@functools.cache
def _load_openai_sdk() -> Reference:
    from openai.types import Model, conversations, responses
    from openai.types.responses.response_item_list import ResponseItemList
    from pydantic import TypeAdapter

    kinds: dict[str, Any] = {
        "response": responses.Response,
        "event": responses.ResponsesServerEvent,
        "compaction": responses.CompactedResponse,
        "response_items": ResponseItemList,
        "input_tokens": responses.InputTokenCountResponse,
        "conversation": conversations.Conversation,
        "deleted_conversation": conversations.ConversationDeletedResource,
        "conversation_items": conversations.ConversationItemList,
        "conversation_item": conversations.ConversationItem,
        "model": Model,
    }
    adapters = [(kind, "validation", TypeAdapter(declared)) for kind, declared in kinds.items()]
    made, shared = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas: Json = {**shared["$defs"], **{f"kind-{kind}": schema for (kind, _), schema in made.items()}}
    return Reference(OPENAI_SDK, schemas, {kind: f"kind-{kind}" for kind in kinds})


def _read_document(name: str) -> Json | None:
    path = DOCUMENTS / _FILES[name]
    if not path.is_file():
        return None
    schemas: Json = json.loads(path.read_text(encoding="utf-8"))["components"]["schemas"]
    return schemas


class _Rewriter:
    """Converts OpenAPI schemas to JSON Schema with unions that report errors of the intended member.

    A validator can only report that no member of a union matches. So a union with null tests for null first, and a
    union of tagged objects selects the members by their tag.
    """

    def __init__(self, schemas: Json) -> None:
        self._schemas = schemas

    def rewrite(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.rewrite(element) for element in node]
        if not isinstance(node, dict):
            return node
        members = node.get("oneOf") or node.get("anyOf")
        if isinstance(members, list):
            rest = {key: value for key, value in node.items() if key in ("type", "properties", "required", "allOf")}
            flat = [found for member in members for found in self._flatten(member)]
            union = self._rewrite_union(flat, is_tagged="discriminator" in node)
            return {"allOf": [self.rewrite(rest), union]} if rest else union
        rewritten = {key: self.rewrite(value) for key, value in node.items()}
        if isinstance(rewritten.get("$ref"), str):
            return {"$ref": rewritten["$ref"].replace("#/components/schemas/", "#/$defs/")}
        return rewritten

    def _flatten(self, member: Json) -> Iterator[Json]:
        """Yield the members of a union, with those of the unions in it."""
        target = self._resolve(member)
        inner = target.get("oneOf") or target.get("anyOf")
        if inner and "properties" not in target:
            for each in inner:
                yield from self._flatten(each)
        else:
            yield member

    def _rewrite_union(self, members: list[Json], *, is_tagged: bool) -> Json:
        others = [member for member in members if member.get("type") != "null"]
        if not others:
            return {"type": "null"}
        if len(others) < len(members):
            rest = self._rewrite_union(others, is_tagged=is_tagged)
            return {"if": {"type": "null"}, "then": True, "else": rest}
        if len(others) == 1 and not is_tagged:
            return dict(self.rewrite(others[0]))
        objects = [member for member in others if self._is_object(member)]
        tags = [self._find_tags(member) for member in objects]
        if not objects or not all(tags):
            return {"anyOf": [self.rewrite(member) for member in others]}
        by_tag: dict[str, list[Json]] = {}
        for member, names in zip(objects, tags, strict=True):
            for name in names:
                by_tag.setdefault(name, []).append(self.rewrite(member))
        selected = _select_by_tag(by_tag)
        simple = [self.rewrite(member) for member in others if member not in objects]
        return {"if": {"type": "object"}, "then": selected, "else": {"anyOf": simple}} if simple else selected

    def _resolve(self, member: Json) -> Json:
        while "$ref" in member:
            member = self._schemas[member["$ref"].rpartition("/")[2]]
        if len(member.get("allOf", ())) == 1:
            return self._resolve(member["allOf"][0])
        return member

    def _is_object(self, member: Json) -> bool:
        target = self._resolve(member)
        return target.get("type") == "object" or "properties" in target or "allOf" in target

    def _find_tags(self, member: Json) -> list[str]:
        target = self._resolve(member)
        for part in (target, *map(self._resolve, target.get("allOf", ()))):
            tag = part.get("properties", {}).get("type", {})
            tag = self._resolve(tag)
            if "const" in tag or "enum" in tag:
                return [tag["const"]] if "const" in tag else list(tag["enum"])
        return []


def _select_by_tag(by_tag: dict[str, list[Json]]) -> Json:
    branches = [
        {"if": {"properties": {"type": {"const": tag}}}, "then": found[0] if len(found) == 1 else {"anyOf": found}}
        for tag, found in by_tag.items()
    ]
    return {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(by_tag)}}, "allOf": branches}
