"""Types and fields of pydantic, for msgspec. pydantic is optional: this module does not import it.

pydantic describes and validates the types that it defines, and msgspec all others. A type of pydantic cannot exist
before a program has imported pydantic, so it is looked up in `sys.modules`.
"""

import copy
import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Union

import msgspec
from msgspec import Meta

from antiphon.errors import ConfigError

# Constraints that msgspec and pydantic have under the same names.
_CONSTRAINTS = frozenset({"ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern"})
# The packages whose annotations pydantic reads.
_PACKAGES = ("pydantic", "pydantic_core", "annotated_types")


class Adapter(type):
    """A class for msgspec that stands for another type. msgspec requires that a decoded value is an instance of it."""

    description: str | None
    """The description in an annotation of the type."""

    def __instancecheck__(cls, value: object) -> bool:
        return True


def support_pydantic(kind: Any, where: str, *, field: Any = None) -> Any:
    """Return a type for msgspec in which pydantic describes and validates the parts that it defines.

    These are its annotations (constraints, validators), its own types, and unions with models. `field` is the `Field`
    that is the default of a parameter. Raises ConfigError, with a path that starts with `where`, if that is impossible.
    """
    if "pydantic" not in sys.modules:
        return kind
    return _support(Annotated[kind, field] if field is not None else kind, where, ())


def is_field(value: object) -> bool:
    """Return True for the result of pydantic's `Field`."""
    return "pydantic" in sys.modules and isinstance(value, sys.modules["pydantic"].fields.FieldInfo)


def find_field_default(kind: Any, field: Any, where: str) -> Callable[[], Any] | None:
    """Return the function that makes the default of a parameter: that of its `Field`, as a default or an annotation.

    Return None if it has none. Raises ConfigError for a function that requires the values of other parameters.
    """
    annotations = typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ()
    fields = [each for each in (*annotations, field) if is_field(each) and not each.is_required()]
    if not fields:
        return None
    if getattr(fields[-1], "default_factory_takes_validated_data", False):
        raise ConfigError(f"{where}: a default_factory with an argument is not supported. Use one without arguments.")
    return functools.partial(fields[-1].get_default, call_default_factory=True)


def describe_pydantic(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a model or of an adapted type. Raises TypeError for another type."""
    name = getattr(kind, "__name__", kind)
    if not _is_model(kind):
        raise TypeError(f"the type {name!r} has no JSON form")
    try:
        schema: dict[str, Any] = kind.model_json_schema()
    except Exception as error:
        raise TypeError(f"the type {name!r} has no JSON form: {error}") from None
    return schema


def validate_pydantic(kind: Any, value: Any) -> Any:
    """Return JSON data as a value of a model or of an adapted type. Raises ValueError."""
    if not _is_model(kind):
        raise NotImplementedError(f"the type {getattr(kind, '__name__', kind)!r} has no JSON form")
    try:
        return kind.model_validate(value)
    except ValueError as error:
        # msgspec adds the path to a ValueError.
        raise ValueError(describe_validation_error(error)) from None


def encode_pydantic(value: Any) -> Any:
    """Return a value of pydantic as JSON data. Raises NotImplementedError for any other value."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if "pydantic" in sys.modules and _is_own_type(type(value)):
        return sys.modules["pydantic"].TypeAdapter(type(value)).dump_python(value, mode="json")
    raise NotImplementedError(f"A value of type {type(value).__name__} cannot be encoded as JSON.")


def describe_validation_error(error: ValueError, *, depth: int = 0) -> str:
    """Return the message of an error without the input and the links that pydantic adds.

    `depth` is the length of the path to leave out.
    """
    if not isinstance(error, sys.modules["pydantic"].ValidationError):
        return str(error)
    found = [(".".join(map(str, each["loc"][depth:])), each["msg"]) for each in error.errors(include_url=False)]
    return "; ".join(f"{path}: {message}" if path else message for path, message in found)


# Types


def _support(kind: Any, where: str, outer: tuple[Any, ...]) -> Any:
    """Return a type for msgspec. `outer` are the types whose fields contain this one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _support_annotated(arguments[0], arguments[1:], where, outer)
    if origin is None:
        is_described = _is_own_type(kind) or _has_own_fields(kind, where, outer)
        return _adapt(kind, where) if is_described else kind
    if origin in (Union, types.UnionType):
        others = [each for each in arguments if each is not type(None)]
        if len(others) > 1:
            return _adapt(kind, where) if any(map(_mentions_pydantic, others)) else kind
    supported = tuple(_support(each, where, outer) for each in arguments)
    if supported == arguments:
        return kind
    return functools.reduce(operator.or_, supported) if origin is types.UnionType else origin[supported]


def _support_annotated(plain: Any, annotations: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> Any:
    own = [each for each in annotations if _is_annotation(each)]
    others = [each for each in annotations if not _is_annotation(each)]
    if own and not _mentions_struct(plain) and not any(map(_has_constraints, others)):
        adapted = _adapt(Annotated[(plain, *own)], where)
        return Annotated[(adapted, *others)] if others else adapted
    # pydantic does not know the types of msgspec.
    translated = [_translate(each, where) if _is_annotation(each) else each for each in annotations]
    return Annotated[(_support(plain, where, outer), *translated)]


def _adapt(kind: Any, where: str) -> type:
    """Return a class that describes and validates a type as pydantic does."""
    pydantic = sys.modules["pydantic"]
    try:
        # Only the field of a model can have all options of `Field`.
        model = pydantic.create_model("Value", value=(kind, ...))
        schema = model.model_json_schema()
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].removesuffix(".")
        raise ConfigError(f"{where}: pydantic cannot describe this type: {reason}.") from error
    ((name, described),) = schema["properties"].items()
    if model.model_fields["value"].title is None:
        described.pop("title", None)
    if "$defs" in schema:
        described["$defs"] = schema["$defs"]

    def validate(value: Any) -> Any:
        try:
            return vars(model.model_validate({name: value}))["value"]
        except pydantic.ValidationError as error:
            raise ValueError(describe_validation_error(error, depth=1)) from None

    attributes = {
        "description": described.get("description"),
        "model_json_schema": staticmethod(lambda: copy.deepcopy(described)),
        "model_validate": staticmethod(validate),
    }
    return Adapter("Value", (), attributes)


def _translate(annotation: Any, where: str) -> Meta:
    """Return an annotation of pydantic as one of msgspec. Raises ConfigError if it is more than constraints."""
    constraints: dict[str, Any] = {}
    for part in annotation.metadata if is_field(annotation) else (annotation,):
        values = {name: getattr(part, name) for name in _list_names(part)}
        constraints |= {name: value for name, value in values.items() if value is not None}
    unsupported = sorted(constraints.keys() - _CONSTRAINTS)
    if unsupported:
        raise ConfigError(
            f"{where}: '{unsupported[0]}' of pydantic does not apply to types and constraints of msgspec."
        )
    return Meta(description=getattr(annotation, "description", None), **constraints)


def _list_names(annotation: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(annotation):
        return [each.name for each in dataclasses.fields(annotation)]
    return list(vars(annotation))


def _mentions_pydantic(kind: Any) -> bool:
    return _is_model(kind) or _is_own_type(kind) or any(map(_mentions_pydantic, typing.get_args(kind)))


def _mentions_struct(kind: Any) -> bool:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return is_struct or any(map(_mentions_struct, typing.get_args(kind)))


def _has_constraints(annotation: Any) -> bool:
    """Return True for an annotation of msgspec that is more than a description."""
    return isinstance(annotation, Meta) and annotation != Meta(description=annotation.description)


def _has_own_fields(kind: Any, where: str, outer: tuple[Any, ...]) -> bool:
    """Return True for a dataclass or TypedDict whose fields have annotations, types or defaults of pydantic."""
    # A TypedDict of `typing_extensions` is another class than that of `typing`.
    has_fields = dataclasses.is_dataclass(kind) or hasattr(kind, "__total__")
    if kind in outer or not (isinstance(kind, type) and has_fields):
        return False
    if dataclasses.is_dataclass(kind) and any(is_field(each.default) for each in dataclasses.fields(kind)):
        return True
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):
        return False
    return any(_support(each, where, (*outer, kind)) != each for each in hints.values())


def _is_model(kind: Any) -> bool:
    """Return True for a model of pydantic, and for an adapted type."""
    return isinstance(kind, type) and hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate")


def _is_own_type(kind: Any) -> bool:
    """Return True for a type, other than a model, that pydantic validates."""
    is_own = hasattr(kind, "__get_pydantic_core_schema__") or hasattr(kind, "__pydantic_validator__")
    return is_own and isinstance(kind, type) and not _is_model(kind)


def _is_annotation(annotation: Any) -> bool:
    """Return True for an annotation that pydantic reads."""
    package = type(annotation).__module__.partition(".")[0]
    return package in _PACKAGES or hasattr(annotation, "__get_pydantic_core_schema__")
