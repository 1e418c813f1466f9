"""An event of every type, with only its required fields."""

from typing import Any

from msgspec import inspect

from antiphon.protocol.codec import EVENTS

_BLANKS: dict[type, Any] = {inspect.IntType: 0, inspect.StrType: "x", inspect.DictType: {}, inspect.ListType: []}


def make_event(kind: str) -> dict[str, Any]:
    info = inspect.type_info(EVENTS.members[kind])
    assert isinstance(info, inspect.StructType)
    required = {field.encode_name: _BLANKS.get(type(field.type), {}) for field in info.fields if field.required}
    return {"type": kind} | required
