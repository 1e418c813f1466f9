"""Open tagged unions: members with an unknown tag are kept as they came.

msgspec's tagged unions reject an unknown tag. The Responses API adds items, tools and events often, some clients omit
the tag, and some send an old one. So a field of such a union is declared as `Raw` for msgspec, with `union_field`, and
the struct's `__post_init__` passes the value to an `OpenUnion`. It decodes the known members and keeps all others as
`Unknown`, byte for byte.

A member that is decoded often declares such a field with `typed_union_field` instead. msgspec then decodes the known
types in one pass with the rest of the member. If it rejects the member, the `OpenUnion` decodes the field separately,
with the same result and the same errors as for a `Raw` field.

Error messages have the same form as msgspec's: each level appends ` - at `$.field``. The declaration also records the
union, so that a JSON schema can be generated from the structs.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from types import GenericAlias
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, Raw, Struct, UnsetType, ValidationError, inspect

T = TypeVar("T")
StructT = TypeVar("StructT", bound=Struct)

copy_struct: Callable[[StructT], StructT] = operator.methodcaller("__copy__")
"""Return a shallow copy of a struct. It costs a fifth of `copy.copy`, and less than `structs.replace`."""

_NULL = Raw(b"null")
_ELEMENTS: "msgspec.json.Decoder[list[Raw]]" = msgspec.json.Decoder(list[Raw])
_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
_TEXT: "msgspec.json.Decoder[str]" = msgspec.json.Decoder(str)


class Wire(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """An object of the API without a tag. Optional fields that are None are omitted when encoding."""


class Tagged(Struct, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"):
    """An object of the API with its tag in the field `type`."""

    @property
    def type(self) -> str:
        return cast(str, self.__struct_config__.tag)


def always(value: T) -> T:
    """Declare a default that is encoded too: the API requires some fields to be present, even as null."""
    return msgspec.field(default_factory=lambda: value)


def always_list() -> list[Any]:
    """Declare an empty list as a default that is encoded too.

    With `list` itself as the factory, msgspec would omit an empty list.
    """
    return msgspec.field(default_factory=_empty_list)


def _empty_list() -> list[Any]:
    return []


class Unknown:
    """An object of an unknown type or form, with its original bytes."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @property
    def type(self) -> str:
        found = self._peek().type
        return found if isinstance(found, str) else ""

    @property
    def id(self) -> str | None:
        found = self._peek().id
        return found if isinstance(found, str) else None

    def _peek(self) -> "Peek":
        try:
            return _PEEK.decode(self.raw)
        except (ValidationError, RecursionError):  # not an object, a tag that is not a string, or nested too deeply
            return Peek()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"Unknown({self.raw!r})"


class Peek(Struct):
    """The fields that determine the type of an object."""

    type: str | UnsetType | None = UNSET
    role: Any = None
    id: Any = None


_PEEK: "msgspec.json.Decoder[Peek]" = msgspec.json.Decoder(Peek)


class Variant(Struct, frozen=True):
    """An alternative form of a member.

    An object with the field `marker` and without the field `absent` is decoded as `form`, and `convert` makes the
    member from it.
    """

    marker: str
    form: type[Struct]
    convert: Callable[[Any], Any]
    absent: str = ""

    def matches(self, fields: Mapping[str, Raw]) -> bool:
        return fields.get(self.marker, _NULL) != _NULL and fields.get(self.absent, _NULL) == _NULL


class OpenUnion(Generic[T]):
    """The members of one open union, by tag.

    `name` is the name of the union in a JSON schema. `aliases` maps other tags that clients send to known tags.
    `untagged` maps fields of `Peek` to the tag of an object without a tag; the first field that is present decides, and
    the member of the first one requires its field. `variants` are alternative forms of members, by tag.
    """

    def __init__(
        self,
        name: str,
        members: Iterable[Any],
        *,
        aliases: Mapping[str, str] | None = None,
        untagged: Mapping[str, str] | None = None,
        variants: Mapping[str, Variant] | None = None,
    ) -> None:
        members = tuple(members)
        self.name = name
        self.members: dict[str, type[T]] = {member.__struct_config__.tag: member for member in members}
        self.known: Any = functools.reduce(operator.or_, members)
        self._decoders: dict[str, Callable[[Raw | bytes], T]] = {}
        self._one: msgspec.json.Decoder[T] = msgspec.json.Decoder(self.known)
        array = GenericAlias(list, (self.known,))
        self._list: msgspec.json.Decoder[list[T]] = msgspec.json.Decoder(array)
        self._lists: msgspec.json.Decoder[list[list[T | Unknown]]] = msgspec.json.Decoder(GenericAlias(list, (array,)))
        self._text_or_list: msgspec.json.Decoder[str | list[T]] = msgspec.json.Decoder(str | array)
        self.aliases = aliases or {}
        self.untagged = untagged or {}
        self.variants = variants or {}
        # Most clients send plain messages without a tag: arrays that begin so are decoded as the first untagged member.
        self._untagged_start = b""
        if self.untagged:
            field, tag = next(iter(self.untagged.items()))
            self._untagged_start = b'[{"%b"' % field.encode()
            self._untagged_list = msgspec.json.Decoder(GenericAlias(list, (self.members[tag],)))

    def decode(self, raw: Raw | bytes) -> T | Unknown:
        """Decode one object. Raise ValidationError if a known member is invalid or has an unknown field."""
        try:
            return self._one.decode(raw)
        except ValidationError:
            return self._decode_by_tag(raw)

    def decode_lossless(self, raw: Raw | bytes) -> T | Unknown:
        """Decode one object without losing data: an invalid member, or one with an unknown field, becomes `Unknown`."""
        try:
            return self.decode(raw)
        except ValidationError:
            unknown = Unknown(bytes(raw))
            if not unknown.type:
                raise
            return unknown

    def _decode_by_tag(self, raw: Raw | bytes) -> T | Unknown:
        peek = _PEEK.decode(raw)
        tag = self._find_tag(peek)
        if tag is None:
            raise ValidationError("Object missing required field `type`")
        if tag not in self.members:
            return Unknown(bytes(raw))
        if tag != peek.type and peek.type is not UNSET:
            raw = _replace_tag(raw, tag)
        variant = self.variants.get(tag)
        if variant is not None and variant.matches(_FIELDS.decode(raw)):
            return cast(T, variant.convert(msgspec.json.decode(raw, type=variant.form)))
        decode = self._decoders.get(tag)
        if decode is None:
            decode = self._decoders[tag] = _make_decoder(self.members[tag])
        return decode(raw)

    def find_form(self, raw: Raw | bytes) -> type[Struct] | None:
        """Return the struct that an object is decoded as, or None if its type is unknown."""
        tag = self._find_tag(_PEEK.decode(raw)) or ""
        variant = self.variants.get(tag)
        if variant is not None and variant.matches(_FIELDS.decode(raw)):
            return variant.form
        return cast("type[Struct] | None", self.members.get(tag))

    def _find_tag(self, peek: Peek) -> str | None:
        """Return the tag of a member, even if the object has another one or none. None: the object needs one."""
        if isinstance(peek.type, str):
            return self.aliases.get(peek.type, peek.type)
        for field, tag in self.untagged.items():
            if getattr(peek, field) is not None:
                return tag
        return None

    def decode_list(self, raw: Raw | bytes) -> list[T | Unknown]:
        """Decode an array: in one pass if every element is a known member with a tag, else element by element."""
        try:
            return cast("list[T | Unknown]", self._list.decode(raw))
        except ValidationError:
            return self._decode_elements(raw, self._decode_by_tag)

    def decode_lists(self, raw: Raw | bytes) -> list[list[T | Unknown]]:
        """Decode an array of arrays. Raise ValidationError unless every element is a known member with a tag."""
        return self._lists.decode(raw)

    def decode_list_lossless(self, raw: Raw | bytes) -> list[T | Unknown]:
        """Decode an array, each element as `decode_lossless` does."""
        try:
            return cast("list[T | Unknown]", self._list.decode(raw))
        except ValidationError:
            return self._decode_elements(raw, self.decode_lossless)

    def _decode_elements(self, raw: Raw | bytes, decode: Callable[[Raw], T | Unknown]) -> list[T | Unknown]:
        decoded: list[T | Unknown] = []
        for element in _ELEMENTS.decode(raw):
            try:
                decoded.append(decode(element))
            except ValidationError as error:
                raise ValidationError(f"{error} - at `$[{len(decoded)}]`") from None
        return decoded

    # The methods below are called by a struct's __post_init__. A value that is not Raw was set by code and is returned
    # unchanged; structs that are created often check that themselves, without a call. A null becomes None, unless the
    # field is required: then it is an invalid value.

    def decode_field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """Decode a field with one member."""
        return self._decode_with(value, name, self.decode, required=required) if isinstance(value, Raw) else value

    def decode_lossless_field(self, value: Any, name: str) -> Any:
        """Decode a required field with one member, as `decode_lossless` does."""
        return self._decode_with(value, name, self.decode_lossless, required=True) if isinstance(value, Raw) else value

    def decode_list_field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """Decode a field with an array of members."""
        return self._decode_with(value, name, self.decode_list, required=required) if isinstance(value, Raw) else value

    def decode_text_or_list_field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """Decode a field with a string or an array of members."""
        if not isinstance(value, Raw):
            return value
        try:
            if self._untagged_start and memoryview(value)[: len(self._untagged_start)] == self._untagged_start:
                return self._untagged_list.decode(value)
            return self._text_or_list.decode(value)
        except ValidationError:
            return self._decode_with(value, name, self._decode_text_or_list, required=required)

    def decode_text_or_field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """Decode a field with a string or one member."""
        return (
            self._decode_with(value, name, self._decode_text_or_member, required=required)
            if isinstance(value, Raw)
            else value
        )

    def _decode_text_or_list(self, raw: Raw) -> str | list[T | Unknown]:
        """Decode a string, or an array that the decoders for a whole array have rejected."""
        if _starts_with(raw, "["):
            return self._decode_elements(raw, self._decode_by_tag)
        return _decode_text(raw, other="array")

    def _decode_text_or_member(self, raw: Raw) -> str | T | Unknown:
        return self.decode(raw) if _starts_with(raw, "{") else _decode_text(raw, other="object")

    def _decode_with(self, value: Raw, name: str, decode: Callable[[Raw], Any], *, required: bool) -> Any:
        if not required and _starts_with(value, "n"):  # null: no other JSON value starts with n
            return None
        try:
            return decode(value)
        except ValidationError as error:
            # msgspec appends the path of the struct only to a ValueError from __post_init__.
            raise ValueError(f"{error} - at `$.{name}`") from None


class UnionField(Struct, frozen=True, kw_only=True):
    """The declaration of a field with an open union.

    Allowed values are a member, or an array of members if `many`; a string if `text`; one of `words`; and null if
    `nullable`. `get_union` is a function because a union may contain itself. If `is_typed`, msgspec knows the members;
    else the field is `Raw` for it. With `null_is_default`, a null in JSON sets the default: the field is never None.
    """

    get_union: Callable[[], OpenUnion[Any]]
    many: bool = False
    text: bool = False
    words: tuple[str, ...] = ()
    nullable: bool = False
    max_items: int | None = None
    is_typed: bool = False
    null_is_default: bool = False


def union_field(
    get_union: Callable[[], OpenUnion[Any]],
    *,
    many: bool = False,
    text: bool = False,
    words: tuple[str, ...] = (),
    nullable: bool = False,
    max_items: int | None = None,
) -> Any:
    """Return the type of a field with an open union: `Raw` for msgspec, annotated with a `UnionField`."""
    field = UnionField(get_union=get_union, many=many, text=text, words=words, nullable=nullable, max_items=max_items)
    return Annotated[Raw, Meta(extra={"union_field": field})]


def typed_union_field(
    union: OpenUnion[Any], *, text: bool = False, nullable: bool = False, null_is_default: bool = False
) -> Any:
    """Return the type of a member's field with an array of an open union. msgspec decodes the known types itself."""
    field = UnionField(
        get_union=lambda: union,
        many=True,
        text=text,
        nullable=nullable or null_is_default,
        is_typed=True,
        null_is_default=null_is_default,
    )
    kinds: Any = GenericAlias(list, (union.known,))
    kinds = str | kinds if text else kinds
    return Annotated[kinds | None if nullable else kinds, Meta(extra={"union_field": field})]


def find_union_field(node: inspect.Type) -> UnionField | None:
    """Return the declaration of a field with an open union, or None for any other type."""
    return (node.extra or {}).get("union_field") if isinstance(node, inspect.Metadata) else None


def _make_decoder(member: Any) -> Callable[[Raw | bytes], T]:
    """Return the decoder of a member. Unknown types in fields made by `typed_union_field` are kept as `Unknown`."""
    decode = msgspec.json.Decoder(member).decode
    found = {field.name: find_union_field(inspect.type_info(field.type)) for field in msgspec.structs.fields(member)}
    unions = {name: field for name, field in found.items() if field is not None and field.is_typed}
    return _OpenForm(member, decode, unions).decode if unions else decode


class _OpenForm(Generic[T]):
    """A decoder that decodes the `unions` fields of a member separately if msgspec rejects the whole object."""

    def __init__(self, member: Any, decode: Callable[[Raw | bytes], T], unions: Mapping[str, UnionField]) -> None:
        self._member = member
        self._decode = decode
        self._unions = unions
        fields = [_make_form_field(field, is_open=field.name in unions) for field in msgspec.structs.fields(member)]
        tag = member.__struct_config__.tag
        form = msgspec.defstruct(member.__name__, fields, bases=(Tagged,), tag=tag, kw_only=True)
        self._form = msgspec.json.Decoder(form)

    def decode(self, raw: Raw | bytes) -> T:
        try:
            return self._decode(raw)
        except ValidationError:
            values = msgspec.structs.asdict(self._form.decode(raw))
        for name, field in self._unions.items():
            decode = field.get_union().decode_text_or_list_field if field.text else field.get_union().decode_list_field
            try:
                values[name] = decode(values[name], name, required=not field.nullable)
            except ValueError as error:
                raise ValidationError(str(error)) from None
            if values[name] is None or values[name] is UNSET:  # null or absent
                del values[name]
        return cast(T, self._member(**values))


def _make_form_field(field: msgspec.structs.FieldInfo, *, is_open: bool) -> tuple[str, Any, Any]:
    kind = Raw if is_open else field.type
    default: dict[str, Any] = {}
    if is_open and not field.required:
        default = {"default": UNSET}
    elif field.default is not NODEFAULT:
        default = {"default": field.default}
    elif field.default_factory is not NODEFAULT:
        default = {"default_factory": field.default_factory}
    return field.name, kind, msgspec.field(name=field.encode_name, **default)


def _decode_text(raw: Raw, *, other: str) -> str:
    try:
        return _TEXT.decode(raw)
    except ValidationError as error:
        raise ValidationError(str(error).replace("`str`", f"`str | {other}`")) from None


def _starts_with(raw: Raw, character: str) -> bool:
    return memoryview(raw)[0] == ord(character)


def _replace_tag(raw: Raw | bytes, tag: str) -> bytes:
    fields = _FIELDS.decode(raw)
    fields["type"] = Raw(msgspec.json.encode(tag))
    return msgspec.json.encode(fields)
