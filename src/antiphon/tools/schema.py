"""From Python types to JSON Schema, in the strict form that models can be held to, and back from JSON to the types.

Dataclasses, TypedDicts, msgspec structs, enums, literals and containers are msgspec's; pydantic's models are asked
themselves, if there are any.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from antiphon.errors import ConfigError
from antiphon.protocol.json_text import read_json

JsonSchema = dict[str, Any]

# What strict mode leaves out of JSON Schema, as far as types can ask for it.
_INEXPRESSIBLE = ("prefixItems", "patternProperties", "propertyNames", "allOf", "not", "if", "uniqueItems")
_REFERENCE = "#/$defs/{name}"


class JsonType:
    """A type as JSON: `schema` says what it may be, `read` and `convert` make it."""

    def __init__(self, kind: Any, *, where: str, strict: bool = True, can_loosen: bool = True) -> None:
        """Raises ConfigError, with the place after `where`, for what cannot be expressed, and with what can be done.

        `can_loosen` says that whoever reads it could have asked for `strict=False`.
        """
        self._kind = kind
        self._loose, self._definitions = _describe(kind, where)
        try:
            self.schema = _assemble(self._loose, self._definitions, where) if strict else self._whole()
        except _Inexpressible as fault:
            loosen = ", or use strict=False" if can_loosen else ""
            raise ConfigError(f"{fault.place}: strict mode {fault.reason}; {fault.remedy}{loosen}.") from None

    def _whole(self) -> JsonSchema:
        used = _find_used(self._loose, self._definitions)
        return self._loose | {"$defs": used} if used else self._loose

    def read(self, text: str | bytes) -> Any:
        """The value that a JSON text stands for. Raises msgspec.ValidationError or msgspec.DecodeError."""
        return self.convert(read_json(text))

    def convert(self, value: Any) -> Any:
        """The value that JSON data stands for. What may be left out may be null: strict mode has no other way."""
        try:
            given = _leave_out(value, self._loose, self._definitions)
            return msgspec.convert(given, self._kind, dec_hook=_build_pydantic)
        except msgspec.ValidationError:
            raise
        except RecursionError:
            raise msgspec.ValidationError("JSON is nested too deeply") from None
        except Exception as error:
            # A type may check itself, and raise what it likes.
            raise msgspec.ValidationError(f"{type(error).__name__}: {error}") from error


class _Inexpressible(Exception):
    """Strict mode has no way to say it."""

    def __init__(self, place: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.place, self.reason, self.remedy = place, reason, remedy


def _describe(kind: Any, where: str) -> tuple[JsonSchema, dict[str, Any]]:
    """The schema as the type has it, with all its definitions in one place."""
    try:
        (schema,), components = msgspec.json.schema_components(
            [kind], schema_hook=_ask_pydantic, ref_template=_REFERENCE
        )
        definitions: dict[str, Any] = dict(components)
        schema = _resolve(schema, definitions)
        _lift(schema, definitions)
        for component in list(definitions.values()):
            _lift(component, definitions)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
    return schema, definitions


def _assemble(loose: JsonSchema, definitions: Mapping[str, Any], where: str) -> JsonSchema:
    schema: JsonSchema = _tighten(loose, where)
    tight = {name: _tighten(each, where) for name, each in _find_used(loose, definitions).items()}
    return schema | {"$defs": tight} if tight else schema


def _leave_out(value: Any, schema: JsonSchema, definitions: Mapping[str, Any]) -> Any:
    """The value without the nulls that stand for what was left out."""
    schema = _resolve(schema, definitions)
    for option in schema.get("anyOf", ()):
        value = _leave_out(value, option, definitions)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [_leave_out(each, schema["items"], definitions) for each in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    properties, required = schema["properties"], schema.get("required", ())
    return {
        name: _leave_out(each, properties.get(name, {}), definitions)
        for name, each in value.items()
        if each is not None or name in required or name not in properties
    }


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate")


def _ask_pydantic(kind: Any) -> JsonSchema:
    if not _is_pydantic(kind):
        raise TypeError(f"the type {getattr(kind, '__name__', kind)!r} has no JSON form")
    try:
        schema: JsonSchema = kind.model_json_schema()
    except Exception as error:
        raise TypeError(f"the type {kind.__name__!r} has no JSON form: {error}") from None
    return schema


def _build_pydantic(kind: Any, value: Any) -> Any:
    if not _is_pydantic(kind):
        raise NotImplementedError(f"the type {getattr(kind, '__name__', kind)!r} has no JSON form")
    try:
        return kind.model_validate(value)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None


def _resolve(schema: JsonSchema, definitions: Mapping[str, Any]) -> JsonSchema:
    """An object at the top: a reference there is replaced by what it names."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: JsonSchema = definitions.get(name, schema)
    return found


def _lift(schema: Any, definitions: dict[str, Any]) -> None:
    """Bring definitions that stand within a schema (pydantic's) to the top, where all references point to."""
    if isinstance(schema, list):
        for each in schema:
            _lift(each, definitions)
    if not isinstance(schema, dict):
        return
    inner = schema.pop("$defs", {})
    for name, definition in inner.items():
        _lift(definition, definitions)
        if definitions.setdefault(name, definition) != definition:
            raise TypeError(f"there are two types called '{name}'")
    for value in schema.values():
        _lift(value, definitions)


def _tighten(schema: Any, where: str) -> Any:
    """The schema with every object closed and every property required; one that may be left out may be null instead."""
    if isinstance(schema, list):
        return [_tighten(each, where) for each in schema]
    if not isinstance(schema, dict):
        return schema
    _check(schema, where)
    tight = {
        key: _tighten(value, where) if key in ("items", "anyOf", "oneOf") else value
        for key, value in schema.items()
        if key not in ("default", "title", "properties")
    }
    if "$ref" in tight and len(tight) > 1:
        # Nothing may stand beside a reference.
        return {"anyOf": [{"$ref": tight.pop("$ref")}]} | tight
    if schema.get("type") == "object":
        return tight | _close(schema, where)
    kind = _find_type(schema.get("enum", ())) if "type" not in schema else None
    return tight if kind is None else {"type": kind} | tight


def _check(schema: JsonSchema, where: str) -> None:
    for keyword in _INEXPRESSIBLE:
        if keyword in schema:
            raise _Inexpressible(where, f"cannot express '{keyword}'", "take another type")
    if not any(keyword in schema for keyword in _TYPES):
        raise _Inexpressible(where, "needs a type", "say which")
    if schema.get("type") == "array" and "items" not in schema:
        raise _Inexpressible(where, "needs the type of what is in the list", "say which")


def _find_type(values: Any) -> str | None:
    """The type of all of these values, where it is one."""
    kinds = {_NAMES.get(type(value)) for value in values}
    return kinds.pop() if len(kinds) == 1 else None


_TYPES = ("type", "anyOf", "oneOf", "enum", "const", "$ref")
_NAMES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _close(schema: JsonSchema, where: str) -> JsonSchema:
    if "properties" not in schema or schema.get("additionalProperties") not in (None, False):
        raise _Inexpressible(
            where, "cannot express an object with keys of any name", "name the keys, or take a list of pairs"
        )
    required = set(schema.get("required", ()))
    properties = {
        name: _tighten(each, f"{where}.{name}") if name in required else _allow_null(_tighten(each, f"{where}.{name}"))
        for name, each in schema.get("properties", {}).items()
    }
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


def _allow_null(schema: JsonSchema) -> JsonSchema:
    described = {"description": schema["description"]} if "description" in schema else {}
    options = schema["anyOf"] if "anyOf" in schema else [{k: v for k, v in schema.items() if k != "description"}]
    if {"type": "null"} in options:
        return schema
    return {"anyOf": [*options, {"type": "null"}]} | described


def is_strict(schema: Any) -> bool:
    """Whether a schema from elsewhere is in the strict form already."""
    if isinstance(schema, list):
        return all(is_strict(each) for each in schema)
    if not isinstance(schema, dict):
        return True
    if not schema or any(keyword in schema for keyword in (*_INEXPRESSIBLE, "default")):
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object":
        closed = schema.get("additionalProperties") is False
        if not closed or set(schema.get("required", ())) != set(properties):
            return False
    inner = [*properties.values(), *schema.get("$defs", {}).values()]
    inner += [schema[key] for key in ("items", "anyOf", "oneOf") if key in schema]
    return all(is_strict(each) for each in inner)


def _find_used(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    used: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for name in _references(waiting.pop()):
            if name in definitions and name not in used:
                used[name] = definitions[name]
                waiting.append(definitions[name])
    return used


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for each in schema for name in _references(each)]
    if not isinstance(schema, dict):
        return []
    own = [str(schema["$ref"]).rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return own + [name for value in schema.values() for name in _references(value)]
