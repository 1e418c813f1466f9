from typing import Any

import msgspec
import pytest
from msgspec import Raw, ValidationError

from antiphon.protocol.unions import (
    OpenUnion,
    Tagged,
    Unknown,
    Variant,
    Wire,
    always,
    always_list,
    typed_union_field,
    union_field,
)


class Cat(Tagged, tag="cat"):
    name: str


class Dog(Tagged, tag="dog"):
    name: str
    tricks: list[str] = always_list()


class Crate(Wire):
    pet: str


class CratedCat(Wire):
    crate: Crate
    type: str


PETS: OpenUnion[Any] = OpenUnion(
    "Pet",
    (Cat, Dog),
    aliases={"hound": "dog"},
    variants={"cat": Variant("crate", CratedCat, lambda crated: Cat(crated.crate.pet))},
)


class Home(Wire):
    one: Raw = Raw(b"null")
    many: Raw = Raw(b"null")
    words: Raw = Raw(b"null")
    word: Raw = Raw(b"null")
    must: Raw = Raw(b"{}")

    def __post_init__(self) -> None:
        self.one = PETS.decode_field(self.one, "one")
        self.many = PETS.decode_list_field(self.many, "many")
        self.words = PETS.decode_text_or_list_field(self.words, "words")
        self.word = PETS.decode_text_or_field(self.word, "word")
        if bytes(self.must) != b"{}":
            self.must = PETS.decode_list_field(self.must, "must", required=True)


@pytest.mark.parametrize(
    ("raw", "pet"),
    [
        (b'{"type":"cat","name":"a"}', Cat("a")),
        (b' { "name" : "a", "type" : "dog" } ', Dog("a")),
        (b'{"type":"hound","name":"a","tricks":["sit"]}', Dog("a", ["sit"])),
        (b'{"type":"cat","crate":{"pet":"a"}}', Cat("a")),
        (b'{"type":"fish","name":"a"}', Unknown(b'{"type":"fish","name":"a"}')),
        (b'{"type":"","name":"a"}', Unknown(b'{"type":"","name":"a"}')),
    ],
)
def test_object_is_decoded_by_tag(raw: bytes, pet: Any) -> None:
    assert PETS.decode(raw) == pet


def test_missing_or_null_tag_is_inferred() -> None:
    class Mouser(Tagged, tag="mouser"):
        role: str

    class Stray(Tagged, tag="stray"):
        id: str
        role: None = None

    union: OpenUnion[Any] = OpenUnion("Pet", (Mouser, Stray), untagged={"role": "mouser", "id": "stray"})
    assert [union.decode(b'{"role":"r"}'), union.decode(b'{"type":null,"role":"r"}')] == [Mouser("r"), Mouser("r")]
    assert [union.decode(b'{"id":"x"}'), union.decode(b'{"id":"x","role":null}')] == [Stray("x"), Stray("x")]


def test_array_may_mix_known_and_unknown_objects() -> None:
    raw = b'[{"type":"cat","name":"a"}, {"type":"fish", "x":1.0}, {"type":"hound","name":"b"}]'
    assert PETS.decode_list(raw) == [Cat("a"), Unknown(b'{"type":"fish", "x":1.0}'), Dog("b")]


def test_union_fields_accept_their_declared_forms() -> None:
    cat = b'{"type":"cat","name":"a"}'
    home = msgspec.json.decode(b'{"one":%b,"many":[%b],"words":"hi","word":"hi"}' % (cat, cat), type=Home)
    assert (home.one, home.many, home.words, home.word) == (Cat("a"), [Cat("a")], "hi", "hi")
    home = msgspec.json.decode(b'{"words":[%b],"word":%b,"one": null}' % (cat, cat), type=Home)
    assert (home.one, home.many, home.words, home.word) == (None, None, [Cat("a")], Cat("a"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"one":5}', "Expected `object`, got `int` - at `$.one`"),
        (b'{"one":{}}', "Object missing required field `type` - at `$.one`"),
        (b'{"one":{"type":"cat","crate":5}}', "Expected `object`, got `int` - at `$.crate` - at `$.one`"),
        (b'{"one":{"type":"cat","name":"a","crate":null}}', "Object contains unknown field `crate` - at `$.one`"),
        (b'{"one":{"type":"dog"}}', "Object missing required field `name` - at `$.one`"),
        (b'{"many":{}}', "Expected `array`, got `object` - at `$.many`"),
        (b'{"many":[{"type":"dog","name":5}]}', "Expected `str`, got `int` - at `$.name` - at `$[0]` - at `$.many`"),
        (b'{"words":5}', "Expected `str | array`, got `int` - at `$.words`"),
        (b'{"word":[]}', "Expected `str | object`, got `array` - at `$.word`"),
        (b'{"must":null}', "Expected `array`, got `null` - at `$.must`"),
    ],
)
def test_errors_contain_the_path(raw: bytes, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        msgspec.json.decode(raw, type=Home)
    assert str(caught.value) == message


class Owner(Tagged, tag="owner"):
    pets: typed_union_field(PETS, text=True)
    lost: typed_union_field(PETS, nullable=True) = None
    sold: typed_union_field(PETS, null_is_default=True) = always_list()
    alias: str | None = msgspec.field(default=None, name="as")


class RawOwner(Tagged, tag="owner"):
    """The same fields, decoded by `__post_init__`."""

    pets: union_field(lambda: PETS, many=True, text=True)
    lost: union_field(lambda: PETS, many=True, nullable=True) = None
    sold: union_field(lambda: PETS, many=True, nullable=True) = always_list()
    alias: str | None = msgspec.field(default=None, name="as")

    def __post_init__(self) -> None:
        self.pets = PETS.decode_text_or_list_field(self.pets, "pets", required=True)
        self.lost = PETS.decode_list_field(self.lost, "lost")
        self.sold = PETS.decode_list_field(self.sold, "sold") or []


OWNERS: OpenUnion[Any] = OpenUnion("Owner", (Owner,), untagged={"role": "owner"})
RAW_OWNERS: OpenUnion[Any] = OpenUnion("Owner", (RawOwner,), untagged={"role": "owner"})
JSON_PETS = (
    '"a cat"',
    "null",
    "[]",
    '[{"type":"cat","name":"a"}]',
    '[{"type":"fish", "x":1}]',
    '[{"type":"hound","name":"b"}]',
    '[{"type":"cat"}]',
    '[{"type":"cat","name":"a","age":1}]',
    "[5]",
    "{}",
)


@pytest.mark.parametrize("name", ["pets", "lost", "sold"])
@pytest.mark.parametrize("pets", JSON_PETS)
@pytest.mark.parametrize("rest", ["", ',"as":"x"', ',"as":5', ',"unknown":1'])
def test_typed_union_field_decodes_like_raw_union_field(name: str, pets: str, rest: str) -> None:
    first = "" if name == "pets" else '"pets":"all",'
    raw = f'[{{"type":"owner",{first}"{name}":{pets}{rest}}}]'.encode()

    def decode(union: OpenUnion[Any]) -> Any:
        try:
            return [msgspec.structs.asdict(owner) for owner in union.decode_list(raw)]
        except ValidationError as error:
            return str(error)

    assert decode(OWNERS) == decode(RAW_OWNERS)


def test_typed_union_field_is_required_without_a_default() -> None:
    with pytest.raises(ValidationError, match="Object missing required field `pets`"):
        OWNERS.decode(b'{"type":"owner"}')


def test_values_set_by_code_are_not_decoded() -> None:
    pets = [Dog("a")]
    assert PETS.decode_list_field(pets, "many") is pets


def test_tagged_object_has_type_property() -> None:
    assert (Dog("a").type, Unknown(b'{"type":"fish"}').type) == ("dog", "fish")


DEEP = b'{"x":%b,"type":"fish"}' % (b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("raw", [b"{}", b'{"type":null}', b'{"type":5,"id":"x"}', b"[]", b'{"id":5}', DEEP])
def test_unknown_without_type_or_id_has_empty_type_and_no_id(raw: bytes) -> None:
    assert (Unknown(raw).type, Unknown(raw).id) == ("", None)


def test_unknown_is_compared_by_bytes() -> None:
    raw = b'{"type":"fish","id":"x"}'
    assert Unknown(raw).id == "x"
    assert repr(Unknown(raw)) == f"Unknown({raw!r})"
    assert {Unknown(raw), Unknown(bytes(raw))} == {Unknown(raw)}
    assert Unknown(raw) != Unknown(raw + b" ")
    assert Unknown(raw) != raw


def test_always_default_is_encoded() -> None:
    class Bowl(Wire):
        full: bool | None = always(None)
        owner: str | None = None
        pets: list[str] = always_list()

    assert msgspec.json.encode(Bowl()) == b'{"full":null,"pets":[]}'
    assert Bowl().pets is not Bowl().pets
