"""Tagged unions that stay open: what we do not know, we keep.

msgspec's own tagged unions refuse an unknown tag. The wire adds new items, tools and events every month, leaves the tag
out of messages, and renames it now and then. So a field that holds such a union is declared as `Raw` to msgspec, and
the struct's `__post_init__` hands it to a `Family`, which decodes the members it knows and keeps the rest as `Unknown`,
byte for byte. Errors keep their path: each level appends ` - at `$.field`` to the message, the way msgspec itself does.
The declaration is made with `holding`, which also says what the field holds: that is where a description of the wire,
such as a JSON schema, has it from.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from types import GenericAlias
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, ValidationError, inspect

T = TypeVar("T")


class Wire(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A plain object of the wire. Unset optional fields are None and are left out when encoding."""


class Tagged(Struct, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"):
    """An object of the wire that names its own kind in `type`."""

    @property
    def type(self) -> str:
        return cast(str, self.__struct_config__.tag)


def always(value: T) -> T:
    """A default that is sent even when it was not set: some fields must be present, null or not."""
    return msgspec.field(default_factory=lambda: value)


def always_list() -> list[Any]:
    """An empty list that is sent. (msgspec knows the factory `list` itself, and would leave the field out.)"""
    return msgspec.field(default_factory=_empty_list)


def _empty_list() -> list[Any]:
    return []


class Unknown:
    """Something of a type we do not know, kept exactly as it came."""

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
        except (ValidationError, RecursionError):  # not an object, or its type is not a string, or nobody can look
            return Peek()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"Unknown({self.raw!r})"


class Peek(Struct):
    """The fields that tell what kind of thing an object is."""

    type: str | UnsetType | None = UNSET
    role: Any = None
    id: Any = None


_PEEK: "msgspec.json.Decoder[Peek]" = msgspec.json.Decoder(Peek)


class Variant(Struct, frozen=True):
    """Another form of a member: an object that has `mark`, and not `without`, is a `form`, and `convert` makes the
    member of it."""

    mark: str
    form: type[Struct]
    convert: Callable[[Any], Any]
    without: str = ""

    def fits(self, fields: Mapping[str, Raw]) -> bool:
        return fields.get(self.mark, _NULL) != _NULL and fields.get(self.without, _NULL) == _NULL


class Family(Generic[T]):
    """The members of one open union, by tag. `name` is what one of them is called.

    `aliases` maps a tag some clients send to the tag we know it by; `untagged` gives the tag of an object without one,
    by the first of these fields (of those that `Peek` has) that it has; `variants` are, by tag, other forms of members.
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

    def one(self, raw: Raw | bytes) -> T | Unknown:
        """Decode one object: at once if it is known and tagged, else by a look at what it is first."""
        try:
            return self._one.decode(raw)
        except ValidationError:
            return self._look_and_decode(raw)

    def keep(self, raw: Raw | bytes) -> T | Unknown:
        """Decode one object, or keep it as it is if it is not in the form we know, or has more in it."""
        try:
            return self.one(raw)
        except ValidationError:
            kept = Unknown(bytes(raw))
            if not kept.type:
                raise
            return kept

    def _look_and_decode(self, raw: Raw | bytes) -> T | Unknown:
        peek = _PEEK.decode(raw)
        sent = peek.type if isinstance(peek.type, str) else None
        tag = self.aliases.get(sent, sent) if sent is not None else self._infer(peek)
        if tag is None:
            raise ValidationError("Object missing required field `type`")
        if tag not in self.members:
            return Unknown(bytes(raw))
        if tag != sent and peek.type is not UNSET:
            raw = _retag(raw, tag)
        variant = self.variants.get(tag)
        if variant is not None and variant.fits(_FIELDS.decode(raw)):
            return cast(T, variant.convert(msgspec.json.decode(raw, type=variant.form)))
        return self._decoder(tag).decode(raw)

    def _infer(self, peek: Peek) -> str | None:
        return next((tag for mark, tag in self.untagged.items() if getattr(peek, mark) is not None), None)

    def _decoder(self, tag: str) -> "msgspec.json.Decoder[T]":
        decoder = self._decoders.get(tag)
        if decoder is None:
            decoder = self._decoders[tag] = msgspec.json.Decoder(self.members[tag])
        return decoder

    def many(self, raw: Raw | bytes) -> list[T | Unknown]:
        """Decode an array: in one pass if everything is known and tagged, else one by one."""
        return self._decode_array(raw, self._look_and_decode)

    def keep_many(self, raw: Raw | bytes) -> list[T | Unknown]:
        """Decode an array as `keep` does each of its elements."""
        return self._decode_array(raw, self.keep)

    def _decode_array(self, raw: Raw | bytes, decode: Callable[[Raw], T | Unknown]) -> list[T | Unknown]:
        try:
            return cast("list[T | Unknown]", self._list.decode(raw))
        except ValidationError:
            return [self._element(element, index, decode) for index, element in enumerate(_ELEMENTS.decode(raw))]

    def _element(self, raw: Raw, index: int, decode: Callable[[Raw], T | Unknown]) -> T | Unknown:
        try:
            return decode(raw)
        except ValidationError as error:
            raise ValidationError(f"{error} - at `$[{index}]`") from None

    # What a struct's __post_init__ calls. Values that are no longer Raw were set by code, and stay. Structs that are
    # made for every answer do not even ask.
    # A null is None, unless the field is required: then it is an error like any other wrong value.

    def field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """A field that holds one member."""
        return self._decode_field(value, name, self.one, required=required) if isinstance(value, Raw) else value

    def kept_field(self, value: Any, name: str) -> Any:
        """A field that holds one member, of whatever form."""
        return self._decode_field(value, name, self.keep, required=True) if isinstance(value, Raw) else value

    def list_field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """A field that holds an array of members."""
        return self._decode_field(value, name, self.many, required=required) if isinstance(value, Raw) else value

    def text_or_list_field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """A field that holds a string or an array of members."""
        if not isinstance(value, Raw):
            return value
        try:
            return self._text_or_list.decode(value)  # nearly always: in one step, as every message has such a field
        except ValidationError:
            return self._decode_field(value, name, self._text_or_many, required=required)

    def text_or_field(self, value: Any, name: str, *, required: bool = False) -> Any:
        """A field that holds a string or one member."""
        return (
            self._decode_field(value, name, self._text_or_one, required=required) if isinstance(value, Raw) else value
        )

    def _text_or_many(self, raw: Raw) -> str | list[T | Unknown]:
        return self.many(raw) if _starts(raw, "[") else _decode_text(raw, other="array")

    def _text_or_one(self, raw: Raw) -> str | T | Unknown:
        return self.one(raw) if _starts(raw, "{") else _decode_text(raw, other="object")

    def _decode_field(self, value: Raw, name: str, decode: Callable[[Raw], Any], *, required: bool) -> Any:
        if not required and _starts(value, "n"):  # null: no other JSON value starts so
            return None
        try:
            return decode(value)
        except ValidationError as error:
            # msgspec adds the path of the struct itself to a ValueError out of __post_init__, and to nothing else.
            raise ValueError(f"{error} - at `$.{name}`") from None


class Holds(Struct, frozen=True, kw_only=True):
    """What an open field holds: members of a family (one, or many of them), or else a text, one of `words`, or null.

    `most` is how many members there may be. The family is a function's result because a member may hold its own family.
    """

    family: Callable[[], Family[Any]]
    many: bool = False
    text: bool = False
    words: tuple[str, ...] = ()
    null: bool = False
    most: int | None = None


def holding(
    family: Callable[[], Family[Any]],
    *,
    many: bool = False,
    text: bool = False,
    words: tuple[str, ...] = (),
    null: bool = False,
    most: int | None = None,
) -> Any:
    """The type of an open field, as msgspec sees it: `Raw`, with a note of what it holds."""
    holds = Holds(family=family, many=many, text=text, words=words, null=null, most=most)
    return Annotated[Raw, Meta(extra={"holds": holds})]


def find_holds(node: inspect.Type) -> Holds | None:
    """What a field of this type holds, if it is an open one."""
    return (node.extra or {}).get("holds") if isinstance(node, inspect.Metadata) else None


_NULL = Raw(b"null")
_ELEMENTS: "msgspec.json.Decoder[list[Raw]]" = msgspec.json.Decoder(list[Raw])
_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
_TEXT: "msgspec.json.Decoder[str]" = msgspec.json.Decoder(str)


def _decode_text(raw: Raw, *, other: str) -> str:
    try:
        return _TEXT.decode(raw)
    except ValidationError as error:
        raise ValidationError(str(error).replace("`str`", f"`str | {other}`")) from None


def _starts(raw: Raw, character: str) -> bool:
    return memoryview(raw)[0] == ord(character)


def _retag(raw: Raw | bytes, tag: str) -> bytes:
    fields = _FIELDS.decode(raw)
    fields["type"] = Raw(msgspec.json.encode(tag))
    return msgspec.json.encode(fields)
