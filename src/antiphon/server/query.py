"""Query strings: the parameters of each operation, and their parsing."""

from typing import Annotated, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct, ValidationError

from antiphon.errors import InvalidRequest
from antiphon.protocol import validation
from antiphon.protocol.request import ENCRYPTED_REASONING, Include
from antiphon.server.http import HttpRequest

Q = TypeVar("Q", bound=Struct)

_LISTS = frozenset({"include", "group_by", "project_ids", "api_key_ids", "user_ids", "models"})
# Lists whose values can also be given in one parameter, with commas between them. Other values may have commas.
_COMMA_LISTS = frozenset({"group_by"})


class NoQuery(Struct):
    """The query of an operation without parameters."""


class ItemQuery(Struct):
    """Parameters of operations that return items. Fields without a value here are always included."""

    include: list[Include] = []

    @property
    def wants_seals(self) -> bool:
        return ENCRYPTED_REASONING in self.include


class PageQuery(ItemQuery):
    """Parameters of a list of items."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ResponseQuery(ItemQuery):
    """Parameters of a response. `include_obfuscation` is accepted and has no effect: nothing is obfuscated."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    include_obfuscation: bool = False


class VersionQuery(Struct):
    """Parameters of a prompt. Without a version, the newest is used."""

    version: str | None = None


def read_query(http_request: HttpRequest, kind: type[Q]) -> Q:
    """Parse the query into a struct. Add a warning about parameters that the struct does not have."""
    fields = _parse(http_request.query) if http_request.query else {}
    known = kind.__struct_fields__
    http_request.warn_ignored(tuple(name for name in fields if name not in known))
    given = {name: values if name in _LISTS else values[-1] for name, values in fields.items() if name in known}
    try:
        return msgspec.convert(given, kind, strict=False)
    except ValidationError as error:
        fault = validation.explain_error(error, kind, msgspec.json.encode(given))
        name, _, _ = fault.path.partition("[")
        raise msgspec.structs.replace(fault, path=name).to_invalid_request() from None


def _parse(query: bytes) -> dict[str, list[str]]:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=100, errors="strict")
    except ValueError:
        raise InvalidRequest(
            "The query string is not valid.",
            code="invalid_query",
        ) from None
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        field = name.removesuffix("[]")
        fields.setdefault(field, []).extend(value.split(",") if field in _COMMA_LISTS else (value,))
    return fields
