"""JSON Schema of Python types, in the strict form that models can be constrained to, and decoding to these types.

msgspec describes and decodes dataclasses, TypedDicts, structs, enums, literals and containers. `pydantic_types.py` is
for the types of pydantic.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import msgspec.inspect as inspection

from antiphon.errors import ConfigError
from antiphon.protocol.json_text import read_json, to_text
from antiphon.tools.pydantic_types import describe_pydantic, support_pydantic, validate_pydantic

JsonSchema = dict[str, Any]

# The keywords, and the formats of strings, that strict mode supports. It rejects others, and lookaround in patterns.
_STRUCTURE = (
    "$defs",
    "$ref",
    "additionalProperties",
    "anyOf",
    "const",
    "enum",
    "items",
    "properties",
    "required",
    "type",
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems")
_STRICT_KEYWORDS = frozenset((*_STRUCTURE, *_BOUNDS, "format", "pattern", "description", "title", "$schema"))
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
# Keywords that Python types can produce, and without which a schema would have another meaning.
_UNSUPPORTED_KEYWORDS = ("prefixItems", "patternProperties", "propertyNames", "allOf", "not", "if", "uniqueItems")
# Keywords that are not part of a strict schema. An optional property has no default, but may be null.
_REMOVED_KEYWORDS = ("default", "title", "discriminator")
_TYPE_KEYWORDS = ("type", "anyOf", "oneOf", "enum", "const", "$ref")
_TYPE_NAMES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_REFERENCE = "#/$defs/{name}"
# The types in a union that have a format, or contain types that may have one.
_JSON_TYPES: dict[type[inspection.Type], str] = {
    inspection.DateTimeType: "string",
    inspection.TimeType: "string",
    inspection.ListType: "array",
    inspection.SetType: "array",
    inspection.VarTupleType: "array",
    inspection.DictType: "object",
    inspection.StructType: "object",
    inspection.DataclassType: "object",
    inspection.TypedDictType: "object",
}


class JsonType:
    """A Python type with its JSON Schema. `decode` and `convert` make values of the type."""

    def __init__(self, kind: Any, *, where: str, strict: bool = True, can_loosen: bool = True) -> None:
        """Describe `kind`. Raises ConfigError if that is impossible, with a path that starts with `where`.

        If `can_loosen` is set, the error suggests `strict=False`.
        """
        self._kind = kind = support_pydantic(kind, where)
        self._loose, self._definitions = _describe(kind, where)
        try:
            self.schema = _make_strict(self._loose, self._definitions, where) if strict else self._make_loose()
        except _UnsupportedType as error:
            loosen = ", or use strict=False" if can_loosen else ""
            raise ConfigError(f"{error.path}: strict mode {error.reason}; {error.remedy}{loosen}.") from None

    def _make_loose(self) -> JsonSchema:
        used = _find_used_definitions(self._loose, self._definitions)
        return self._loose | {"$defs": used} if used else self._loose

    def decode(self, text: str | bytes) -> Any:
        """Decode a JSON text. Raises msgspec.ValidationError or msgspec.DecodeError."""
        return self.convert(read_json(text))

    def convert(self, value: Any) -> Any:
        """Convert JSON data to the type. Null is accepted for an optional property and means its default.

        Raises msgspec.ValidationError.
        """
        try:
            given = _drop_nulls(value, self._loose, self._definitions)
            # The keys of a JSON object are texts, even if those of the type are numbers.
            converted = msgspec.convert(given, self._kind, str_keys=True, dec_hook=validate_pydantic)
            if self._definitions:
                _store_defaults(converted)
            return converted
        except msgspec.ValidationError:
            raise
        except RecursionError:
            raise msgspec.ValidationError("JSON is nested too deeply") from None
        except Exception as error:
            # A type may validate itself and raise any exception.
            raise msgspec.ValidationError(f"{type(error).__name__}: {error}") from error


def is_strict(schema: Any) -> bool:
    """Return True if a schema is in strict form."""
    if isinstance(schema, list):
        return all(is_strict(each) for each in schema)
    if not isinstance(schema, dict):
        return True
    if not schema or _find_rejected(schema):
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object":
        closed = schema.get("additionalProperties") is False
        if not closed or set(schema.get("required", ())) != set(properties):
            return False
    inner = [*properties.values(), *schema.get("$defs", {}).values()]
    inner += [schema[key] for key in ("items", "anyOf") if key in schema]
    return all(is_strict(each) for each in inner)


class _UnsupportedType(Exception):
    """A type that strict mode cannot express. `path` is its position in the schema."""

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.path, self.reason, self.remedy = path, reason, remedy


# Schema of a type


def _describe(kind: Any, where: str) -> tuple[JsonSchema, dict[str, Any]]:
    """Return the schema of a type and all definitions that it references."""
    try:
        (schema,), components = msgspec.json.schema_components(
            [kind], schema_hook=describe_pydantic, ref_template=_REFERENCE
        )
        definitions: dict[str, Any] = dict(components)
        _add_formats(schema, inspection.type_info(kind), definitions, set())
        _lift_definitions(schema, definitions)
        for component in list(definitions.values()):
            _lift_definitions(component, definitions)
        # A recursive model of pydantic is a reference to one of its definitions.
        schema = _resolve(schema, definitions)
    except NameError as error:
        raise ConfigError(f"{where}: {error}. Define or import it at the top of the module.") from None
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: a type that contains itself must be a class, not an alias.") from None
    return schema, definitions


def _resolve(schema: JsonSchema, definitions: Mapping[str, Any]) -> JsonSchema:
    """Return the definition that a schema references, else the schema. The top of a strict schema is an object."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: JsonSchema = definitions.get(name, schema)
    return found


def _lift_definitions(schema: Any, definitions: dict[str, Any]) -> None:
    """Move definitions that pydantic nests within a schema to the top, where all references point to."""
    if isinstance(schema, list):
        for each in schema:
            _lift_definitions(each, definitions)
    if not isinstance(schema, dict):
        return
    inner = schema.pop("$defs", {})
    for name, definition in inner.items():
        _lift_definitions(definition, definitions)
        if definitions.setdefault(name, definition) != definition:
            raise TypeError(f"there are two types called '{name}'")
    for value in schema.values():
        _lift_definitions(value, definitions)


def _add_formats(schema: JsonSchema, info: inspection.Type, definitions: Mapping[str, Any], seen: set[int]) -> None:
    """Add the formats of dates with time, and of times, which msgspec omits if a time zone is not required."""
    schema = _resolve(schema, definitions)
    if isinstance(info, inspection.Metadata):
        info = info.type
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(info, inspection.DateTimeType):
        schema["format"] = "date-time"
    elif isinstance(info, inspection.TimeType):
        schema["format"] = "time"
    for inner, inner_info in _list_inner(schema, info, definitions):
        _add_formats(inner, inner_info, definitions, seen)


def _list_inner(
    schema: JsonSchema, info: inspection.Type, definitions: Mapping[str, Any]
) -> list[tuple[JsonSchema, inspection.Type]]:
    """Return the schemas within a schema, each with its type."""
    match info:
        case inspection.UnionType():
            # An option is found by its JSON type, which is different for each.
            options = {_resolve(each, definitions).get("type"): each for each in schema.get("anyOf", ())}
            named = [(_JSON_TYPES.get(type(each)), each) for each in info.types]
            return [(options[name], each) for name, each in named if name in options]
        case inspection.ListType() | inspection.SetType() | inspection.VarTupleType() if "items" in schema:
            return [(schema["items"], info.item_type)]
        case inspection.DictType() if isinstance(schema.get("additionalProperties"), dict):
            return [(schema["additionalProperties"], info.value_type)]
        case inspection.StructType() | inspection.DataclassType() | inspection.TypedDictType():
            properties = schema.get("properties", {})
            fields = [each for each in info.fields if each.encode_name in properties]
            return [(properties[each.encode_name], each.type) for each in fields]
    return []


def _find_used_definitions(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    used: dict[str, Any] = {}
    pending = [schema]
    while pending:
        for name in _find_references(pending.pop()):
            if name in definitions and name not in used:
                used[name] = definitions[name]
                pending.append(definitions[name])
    return used


def _find_references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for each in schema for name in _find_references(each)]
    if not isinstance(schema, dict):
        return []
    own = [str(schema["$ref"]).rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return own + [name for value in schema.values() for name in _find_references(value)]


# Strict form


def _make_strict(loose: JsonSchema, definitions: Mapping[str, Any], where: str) -> JsonSchema:
    schema: JsonSchema = _tighten(loose, where)
    used = {name: _tighten(each, where) for name, each in _find_used_definitions(loose, definitions).items()}
    return schema | {"$defs": used} if used else schema


def _tighten(schema: Any, path: str) -> Any:
    """Close every object and require every property. An optional property becomes nullable instead."""
    if isinstance(schema, list):
        return [_tighten(each, path) for each in schema]
    if not isinstance(schema, dict):
        return schema
    _check_support(schema, path)
    schema = _describe_rejected(schema)
    tight = {
        # Strict mode supports no `oneOf`. The options of a discriminated union exclude each other in any case.
        "anyOf" if key == "oneOf" else key: _tighten(value, path) if key in ("items", "anyOf", "oneOf") else value
        for key, value in schema.items()
        if key not in (*_REMOVED_KEYWORDS, "properties")
    }
    if "$ref" in tight and len(tight) > 1:
        # Strict mode allows no other keyword next to a reference.
        return {"anyOf": [{"$ref": tight.pop("$ref")}]} | tight
    if schema.get("type") == "object":
        return tight | _close_object(schema, path)
    kind = _find_type_name(schema.get("enum", ())) if "type" not in schema else None
    return tight if kind is None else {"type": kind} | tight


def _check_support(schema: JsonSchema, path: str) -> None:
    for keyword in _UNSUPPORTED_KEYWORDS:
        if keyword in schema:
            raise _UnsupportedType(path, f"cannot express '{keyword}'", "use another type")
    if not any(keyword in schema for keyword in _TYPE_KEYWORDS):
        raise _UnsupportedType(path, "needs a type", "add one")
    if schema.get("type") == "array" and "items" not in schema:
        raise _UnsupportedType(path, "needs the type of the list's items", "add it")


def _find_rejected(schema: JsonSchema) -> list[str]:
    """Return the keywords of a schema that strict mode rejects."""
    return [
        keyword
        for keyword, value in schema.items()
        if keyword not in _STRICT_KEYWORDS
        or (keyword == "format" and value not in _FORMATS)
        or (keyword == "pattern" and _LOOKAROUND.search(str(value)))
    ]


def _describe_rejected(schema: JsonSchema) -> JsonSchema:
    """Return the schema with keywords that strict mode rejects in the description, where the model reads them."""
    rejected = [keyword for keyword in _find_rejected(schema) if keyword not in (*_REMOVED_KEYWORDS, "oneOf")]
    if not rejected:
        return schema
    notes = ", ".join(f"{keyword}: {to_text(schema[keyword])}" for keyword in rejected)
    description = f"{schema['description']} ({notes})" if "description" in schema else notes
    return {name: value for name, value in schema.items() if name not in rejected} | {"description": description}


def _find_type_name(values: Any) -> str | None:
    """Return the JSON type of the values if they all have the same."""
    kinds = {_TYPE_NAMES.get(type(value)) for value in values}
    return kinds.pop() if len(kinds) == 1 else None


def _close_object(schema: JsonSchema, path: str) -> JsonSchema:
    if "properties" not in schema or schema.get("additionalProperties") not in (None, False):
        raise _UnsupportedType(
            path, "cannot express an object with arbitrary keys", "declare the keys, or use a list of pairs"
        )
    required = set(schema.get("required", ()))
    properties = {
        name: _tighten(each, f"{path}.{name}") if name in required else _allow_null(_tighten(each, f"{path}.{name}"))
        for name, each in schema.get("properties", {}).items()
    }
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


def _allow_null(schema: JsonSchema) -> JsonSchema:
    described = {"description": schema["description"]} if "description" in schema else {}
    options = schema["anyOf"] if "anyOf" in schema else [{k: v for k, v in schema.items() if k != "description"}]
    if {"type": "null"} in options:
        return schema
    return {"anyOf": [*options, {"type": "null"}]} | described


# Conversion of values


def _drop_nulls(value: Any, schema: JsonSchema, definitions: Mapping[str, Any]) -> Any:
    """Return the value without nulls of optional properties: strict mode has no other way to omit one."""
    schema = _resolve(schema, definitions)
    options = [_resolve(each, definitions) for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))]
    # A property that is optional in one option may be required in another.
    for option in [each for each in options if _fits(value, each)] or options:
        value = _drop_nulls(value, option, definitions)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [_drop_nulls(each, schema["items"], definitions) for each in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    properties, required = schema["properties"], schema.get("required", ())
    return {
        name: _drop_nulls(each, properties.get(name, {}), definitions)
        for name, each in value.items()
        if each is not None or name in required or name not in properties
    }


def _fits(value: Any, schema: JsonSchema) -> bool:
    """Return True if an object has the names of a schema, and its fixed values. The other values are not compared."""
    properties = schema.get("properties")
    if not isinstance(value, dict) or properties is None:
        return False
    fixed = {name: [each["const"]] if "const" in each else each.get("enum") for name, each in properties.items()}
    return set(schema.get("required", ())) <= set(value) <= set(properties) and all(
        each is None or fixed[name] is None or each in fixed[name] for name, each in value.items()
    )


def _store_defaults(value: Any) -> None:
    """Store the defaults of dataclasses in their instances.

    msgspec leaves a default in the class. It would not be encoded with the instance.
    """
    if isinstance(value, list | tuple | set | frozenset):
        for each in value:
            _store_defaults(each)
    elif isinstance(value, dict):
        _store_defaults(list(value.values()))
    elif isinstance(value, msgspec.Struct):
        _store_defaults([getattr(value, name) for name in value.__struct_fields__])
    elif dataclasses.is_dataclass(value):
        fields, stored = dataclasses.fields(value), getattr(value, "__dict__", {})
        for field in fields:
            # The attribute of the class is the default, or a slot. msgspec sets slots.
            is_missing = field.name not in stored and field.default is not dataclasses.MISSING
            if is_missing and getattr(type(value), field.name, None) is field.default:
                stored[field.name] = field.default
        _store_defaults([getattr(value, field.name, None) for field in fields])
