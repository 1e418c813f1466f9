"""Open tagged unions: members with an unknown tag are kept as they came.

msgspec's tagged unions reject an unknown tag. The Responses API adds items, tools and events often, some clients omit
the tag, and some send an old one. So a field of such a union is declared as `Raw` for msgspec, with `union_field`, and
the struct's `__post_init__` passes the value to an `OpenUnion`. It decodes the known members and keeps all others as
`Unknown`, byte for byte.

Error messages have the same form as msgspec's: each level appends ` - at `$.field``. The declaration also records the
union, so that a JSON schema can be generated from the structs.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from types import GenericAlias
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, ValidationError, inspect

T = TypeVar("T")

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
        except (ValidationError, RecursionError):  # no object, a tag that is no string, or nested too deeply
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
    `untagged` maps fields of `Peek` to the tag of an object without a tag; the first field that is present decides.
    `variants` are alternative forms of members, by tag.
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
        self._decoders: dict[str, msgspec.json.Decoder[T]] = {}
        union = functools.reduce(operator.or_, members)
        self._one: msgspec.json.Decoder[T] = msgspec.json.Decoder(union)
        array = GenericAlias(list, (union,))
        self._list: msgspec.json.Decoder[list[T]] = msgspec.json.Decoder(array)
        self._text_or_list: msgspec.json.Decoder[str | list[T]] = msgspec.json.Decoder(str | array)
        self.aliases = aliases or {}
        self.untagged = untagged or {}
        self.variants = variants or {}

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
        sent = peek.type if isinstance(peek.type, str) else None
        tag = self.aliases.get(sent, sent) if sent is not None else self._infer_tag(peek)
        if tag is None:
            raise ValidationError("Object missing required field `type`")
        if tag not in self.members:
            return Unknown(bytes(raw))
        if tag != sent and peek.type is not UNSET:
            raw = _replace_tag(raw, tag)
        variant = self.variants.get(tag)
        if variant is not None and variant.matches(_FIELDS.decode(raw)):
            return cast(T, variant.convert(msgspec.json.decode(raw, type=variant.form)))
        return self._decoder(tag).decode(raw)

    def _infer_tag(self, peek: Peek) -> str | None:
        return next((tag for field, tag in self.untagged.items() if getattr(peek, field) is not None), None)

    def _decoder(self, tag: str) -> "msgspec.json.Decoder[T]":
        decoder = self._decoders.get(tag)
        if decoder is None:
            decoder = self._decoders[tag] = msgspec.json.Decoder(self.members[tag])
        return decoder

    def decode_list(self, raw: Raw | bytes) -> list[T | Unknown]:
        """Decode an array: in one pass if every element has a known tag, else element by element."""
        return self._decode_array(raw, self._decode_by_tag)

    def decode_list_lossless(self, raw: Raw | bytes) -> list[T | Unknown]:
        """Decode an array, each element as `decode_lossless` does."""
        return self._decode_array(raw, self.decode_lossless)

    def _decode_array(self, raw: Raw | bytes, decode: Callable[[Raw], T | Unknown]) -> list[T | Unknown]:
        try:
            return cast("list[T | Unknown]", self._list.decode(raw))
        except ValidationError:
            return [self._decode_element(element, index, decode) for index, element in enumerate(_ELEMENTS.decode(raw))]

    def _decode_element(self, raw: Raw, index: int, decode: Callable[[Raw], T | Unknown]) -> T | Unknown:
        try:
            return decode(raw)
        except ValidationError as error:
            raise ValidationError(f"{error} - at `$[{index}]`") from None

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
            return self._text_or_list.decode(value)  # fast path: every message has such a field
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
        return self.decode_list(raw) if _starts_with(raw, "[") else _decode_text(raw, other="array")

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
    `nullable`. `get_union` is a function because a union may contain itself.
    """

    get_union: Callable[[], OpenUnion[Any]]
    many: bool = False
    text: bool = False
    words: tuple[str, ...] = ()
    nullable: bool = False
    max_items: int | None = None


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


def find_union_field(node: inspect.Type) -> UnionField | None:
    """Return the declaration of a field with an open union, or None for any other type."""
    return (node.extra or {}).get("union_field") if isinstance(node, inspect.Metadata) else None


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
