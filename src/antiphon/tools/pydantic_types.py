"""Types and fields of pydantic, for msgspec. pydantic is optional: only a type that needs it imports it.

pydantic describes and validates the types that it defines, and msgspec all others. Annotations that msgspec has too,
descriptions and constraints, are translated, so that they do not change how the rest of a type is decoded.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Generic, NotRequired, Required, Union

import msgspec
from msgspec import Meta

from antiphon.errors import ConfigError

# Options of `Field`, besides constraints. msgspec has no discriminator.
_FIELD_OPTIONS = ("description", "title", "examples", "discriminator")
# The packages whose annotations pydantic reads.
_PACKAGES = ("pydantic", "pydantic_core", "annotated_types")
_UNIONS = (Union, types.UnionType)


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
    if not any(package in sys.modules for package in _PACKAGES):
        return kind
    return _support(Annotated[kind, field] if field is not None else kind, where)


def is_field(value: object) -> bool:
    """Return True for the result of pydantic's `Field`."""
    fields = sys.modules.get("pydantic.fields")  # `import pydantic` alone does not import it
    return fields is not None and isinstance(value, fields.FieldInfo)


def find_field_default(kind: Any, field: Any, where: str) -> Callable[[], Any] | None:
    """Return the function that makes the default of a parameter: that of its `Field`, as a default or an annotation.

    Return None if it has none. Raises ConfigError for a function that requires the values of other parameters.
    """
    fields = [each for each in (*_list_annotations(kind), field) if is_field(each) and not each.is_required()]
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
        raise TypeError(f"the type {name!r} has no JSON form: {_shorten_reason(error)}") from None
    return schema


def validate_pydantic(kind: Any, value: Any) -> Any:
    """Return JSON data as a value of a model or of an adapted type. Raises ValueError."""
    if not _is_model(kind):
        raise NotImplementedError(f"the type {getattr(kind, '__name__', kind)!r} has no JSON form")
    try:
        # A strict model accepts the texts of dates and enums only in JSON.
        return kind.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        # msgspec adds the path to a ValueError.
        raise ValueError(describe_validation_error(error)) from None


def encode_pydantic(value: Any) -> Any:
    """Return a value of pydantic as JSON data, with the aliases of its fields.

    A `serialization_alias` has priority, although the schema has the alias for validation. Raises NotImplementedError
    for any other value.
    """
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    kind: Any = type(value)
    if "pydantic" in sys.modules and _is_own_type(kind):
        return _make_type_adapter(kind).dump_python(value, mode="json", by_alias=True)
    raise NotImplementedError(f"A value of type {kind.__name__} cannot be encoded as JSON.")


@functools.lru_cache(maxsize=64)
def _make_type_adapter(kind: Any) -> Any:
    """Return the encoder of a type. To make it takes far longer than to use it."""
    return sys.modules["pydantic"].TypeAdapter(kind)


def describe_validation_error(error: ValueError, *, depth: int = 0) -> str:
    """Return the message of an error without the input and the links that pydantic adds.

    `depth` is the length of the path to leave out.
    """
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        return str(error)
    found = [(".".join(map(str, each["loc"][depth:])), each["msg"]) for each in error.errors(include_url=False)]
    return "; ".join(f"{path}: {message}" if path else message for path, message in found)


# Types


def _support(kind: Any, where: str) -> Any:
    """Return a type for msgspec."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _support_annotated(arguments[0], arguments[1:], where)
    if _is_own_type(kind) or _has_own_parts(kind):
        _check_no_msgspec(kind, where)
        return _adapt(kind, where)
    supported = tuple(_support(each, where) for each in arguments)
    if origin in _UNIONS and (_is_own_union(arguments) or _is_own_union(supported)):
        # msgspec refuses unions of dataclasses. Outputs have another form for them (`ChoiceType`).
        has_form = sum(map(_has_fields, arguments)) > 1 and not _is_own_union(arguments)
        return kind if has_form else _adapt(kind, where)
    return _rebuild(kind, supported)


def _support_annotated(plain: Any, annotations: tuple[Any, ...], where: str) -> Any:
    translated = [_translate(each) if _is_annotation(each) else each for each in annotations]
    if not any(map(_is_annotation, translated)):
        supported: Any = Annotated[(_support(plain, where), *translated)]
        if translated == list(annotations) or _is_described(supported):
            return supported
    own = [each for each in annotations if _is_annotation(each)]
    others = [each for each in annotations if not _is_annotation(each)]
    _check_no_msgspec(Annotated[(plain, *annotations)], where)
    adapted = _adapt(Annotated[(plain, *own)], where)
    return Annotated[(adapted, *others)] if others else adapted


def _check_no_msgspec(kind: Any, where: str) -> None:
    """Raise ConfigError for a type with structs or constraints of msgspec. pydantic would refuse or ignore them."""
    for each in _walk(kind, set()):
        is_struct = isinstance(each, type) and issubclass(each, msgspec.Struct)
        if is_struct or any(map(_has_constraints, _list_annotations(each))):
            name = each.__name__ if is_struct else "Meta"
            raise ConfigError(f"{where}: pydantic validates this type, and does not support '{name}' of msgspec.")


def _adapt(kind: Any, where: str) -> type:
    """Return a class that describes and validates a type as pydantic does."""
    try:
        pydantic = importlib.import_module("pydantic")
    except ImportError:
        # The package annotated_types can be installed alone.
        raise ConfigError(f"{where}: this type requires pydantic, which is not installed.") from None
    try:
        # Only the field of a model can have all options of `Field`.
        model = pydantic.create_model("Value", value=(_convert_typed_dicts(kind, {}), ...))
        schema = model.model_json_schema()
    except Exception as error:
        raise ConfigError(f"{where}: pydantic cannot describe this type: {_shorten_reason(error)}.") from error
    ((name, described),) = schema["properties"].items()
    if model.model_fields["value"].title is None:
        described.pop("title", None)
    if "$defs" in schema:
        described["$defs"] = schema["$defs"]

    def validate(data: bytes) -> Any:
        try:
            return vars(model.model_validate_json(msgspec.json.encode({name: msgspec.Raw(data)})))["value"]
        except pydantic.ValidationError as error:
            raise ValueError(describe_validation_error(error, depth=1)) from None

    attributes = {
        "description": described.get("description"),
        "model_json_schema": staticmethod(lambda: copy.deepcopy(described)),
        "model_validate_json": staticmethod(validate),
    }
    return Adapter("Value", (), attributes)


def _shorten_reason(error: Exception) -> str:
    """Return the first sentence of an error of pydantic, or the cause at its end if the first line announces one."""
    first, *others = str(error).splitlines() or [type(error).__name__]
    reason = others[-1].strip() if others and first.endswith(":") else first
    return reason.partition(". ")[0].removesuffix(".")


def _convert_typed_dicts(kind: Any, converted: dict[Any, Any]) -> Any:
    """Return a type without TypedDicts of `typing`, which pydantic refuses before Python 3.12.

    `converted` are those that have been replaced. One that contains itself stays, and pydantic refuses it.
    """
    if sys.version_info >= (3, 12):
        return kind
    if not (type(kind).__module__ == "typing" and hasattr(kind, "__total__")):
        arguments = tuple(_convert_typed_dicts(each, converted) for each in typing.get_args(kind))
        origin = typing.get_origin(kind)
        is_generic = hasattr(origin, "__total__")
        return _convert_typed_dicts(origin, converted)[arguments] if is_generic else _rebuild(kind, arguments)
    if kind not in converted:
        converted[kind] = kind
        hints: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            is_marked = typing.get_origin(hint) in (Required, NotRequired)
            mark = Required if name in kind.__required_keys__ else NotRequired
            hints[name] = _convert_typed_dicts(hint if is_marked else mark[hint], converted)
        # pydantic depends on this package.
        bases: list[Any] = [sys.modules["typing_extensions"].TypedDict]
        if parameters := getattr(kind, "__parameters__", ()):
            bases.append(Generic[parameters])  # type: ignore[index]  # parameters that are known at runtime
        made = types.new_class(kind.__name__, bases, {}, lambda names: names.update(__annotations__=hints))
        for attribute in ("__module__", "__doc__", "__pydantic_config__"):
            if hasattr(kind, attribute):
                setattr(made, attribute, getattr(kind, attribute))
        converted[kind] = made
    return converted[kind]


def _translate(annotation: Any) -> Any:
    """Return an annotation of pydantic as one of msgspec, or unchanged if msgspec has no such annotation."""
    values: dict[str, Any] = {}
    parts = (annotation,)
    if is_field(annotation):
        values = {name: getattr(annotation, name) for name in _FIELD_OPTIONS}
        values["extra_json_schema"] = annotation.json_schema_extra
        parts = annotation.metadata
    elif hasattr(annotation, "__get_pydantic_core_schema__"):
        return annotation
    try:
        for part in parts:
            values |= {name: getattr(part, name) for name in _list_names(part)}
        # Constraints have the same names in both packages.
        return Meta(**{name: value for name, value in values.items() if value is not None})
    except Exception:
        return annotation


def _is_described(kind: Any) -> bool:
    """Return True if msgspec supports a type with its annotations."""
    try:
        msgspec.json.schema_components([kind], schema_hook=describe_pydantic)
    except Exception:
        return False
    return True


def _list_names(annotation: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(annotation):
        return [each.name for each in dataclasses.fields(annotation)]
    return list(vars(annotation))


def _rebuild(kind: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a generic type with other arguments."""
    if arguments == typing.get_args(kind):
        return kind
    origin: Any = typing.get_origin(kind)
    return (Union if origin is types.UnionType else origin)[arguments if len(arguments) > 1 else arguments[0]]


def _walk(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield a type, its arguments, the type that it names, and the types and `Field` defaults of its fields.

    `seen` are the types that have been visited. Each is visited once: many types may contain each other.
    """
    yield kind
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    for each in arguments[:1] if origin is Annotated else arguments:
        yield from _walk(each, seen)
    definition = origin or kind
    if not (_has_fields(definition) or _is_name(definition)) or definition in seen:
        return
    seen.add(definition)
    if dataclasses.is_dataclass(definition):
        yield from (each.default for each in dataclasses.fields(definition) if is_field(each.default))
    with contextlib.suppress(NameError, TypeError):
        for each in _list_inner(definition):
            yield from _walk(each, seen)


def _list_inner(definition: Any) -> Iterable[Any]:
    """Return the types of the fields, or the type that a name stands for."""
    if _has_fields(definition):
        return typing.get_type_hints(definition, include_extras=True).values()
    return [definition.__supertype__ if isinstance(definition, typing.NewType) else definition.__value__]


def _list_annotations(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ()


def _is_own_union(kinds: Iterable[Any]) -> bool:
    """Return True if pydantic validates a union of these types: msgspec supports only None next to its models."""
    others = [each for each in kinds if each is not type(None)]
    return len(others) > 1 and any(map(_mentions_pydantic, others))


def _mentions_pydantic(kind: Any) -> bool:
    return _is_model(kind) or _is_own_type(kind) or any(map(_mentions_pydantic, typing.get_args(kind)))


def _has_constraints(annotation: Any) -> bool:
    """Return True for an annotation of msgspec that is more than a description."""
    return isinstance(annotation, Meta) and annotation != Meta(description=annotation.description)


def _has_fields(kind: Any) -> bool:
    """Return True for a dataclass or TypedDict."""
    # A TypedDict of `typing_extensions` is another class than that of `typing`.
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "__total__"))


def _is_name(kind: Any) -> bool:
    """Return True for an alias (`type Name = ...`) and a `NewType`."""
    return isinstance(kind, typing.NewType) or type(kind).__name__ == "TypeAliasType"


def _has_own_parts(kind: Any) -> bool:
    """Return True for a type with fields, or a name of a type, that has annotations, types or defaults of pydantic."""
    definition = typing.get_origin(kind) or kind
    if not (_has_fields(definition) or _is_name(definition)):
        return False
    return any(
        is_field(each)
        or _is_own_type(each)
        or any(map(_is_annotation, _list_annotations(each)))
        or (typing.get_origin(each) in _UNIONS and _is_own_union(typing.get_args(each)))
        for each in _walk(kind, set())
    )


def _is_model(kind: Any) -> bool:
    """Return True for a model of pydantic, and for an adapted type."""
    return isinstance(kind, type) and hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate_json")


def _is_own_type(kind: Any) -> bool:
    """Return True for a type, other than a model, that pydantic validates."""
    definition = typing.get_origin(kind) or kind
    is_own = hasattr(definition, "__get_pydantic_core_schema__") or hasattr(definition, "__pydantic_validator__")
    return is_own and isinstance(definition, type) and not _is_model(definition)


def _is_annotation(annotation: Any) -> bool:
    """Return True for an annotation that pydantic reads."""
    package = type(annotation).__module__.partition(".")[0]
    return package in _PACKAGES or hasattr(annotation, "__get_pydantic_core_schema__")
