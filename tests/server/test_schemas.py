from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec import Struct

from antiphon.protocol.unions import OpenUnion, Tagged, Variant, Wire, always, always_list, union_field
from antiphon.server.schemas import Components


class Cat(Tagged, tag="cat"):
    name: str


class Dog(Tagged, tag="dog"):
    id: str
    pups: union_field(lambda: PETS, many=True, max_items=2) = always_list()


class CratedCat(Wire):
    crate: dict[str, str]


PETS: OpenUnion[Any] = OpenUnion(
    "Pet",
    (Cat, Dog),
    aliases={"hound": "dog"},
    untagged={"role": "cat", "id": "dog"},
    variants={"cat": Variant("crate", CratedCat, lambda crated: Cat(crated.crate["name"]))},
)


class Request(Wire):
    pet: union_field(lambda: PETS, text=True, nullable=True) = None


class Reply(Wire):
    pet: union_field(lambda: PETS, words=("none",))
    count: int = always(0)
    note: str | None = None


COMPONENTS = Components(read=[Request], sent=[Reply])


def fits(kind: type[Struct], value: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": {"schemas": COMPONENTS.schemas}}
    return Draft202012Validator(schema).is_valid(value)


def test_schema_of_a_type_includes_nested_types() -> None:
    assert set(COMPONENTS.schemas) == {
        "Request",
        "Cat",
        "CratedCat",
        "Dog",
        "InputPet",
        "Pet",
        "Reply",
        "UnknownPet",
        "UntaggedCat",
        "UntaggedDog",
    }
    assert COMPONENTS.describe(Request, read=True) == {"$ref": "#/components/schemas/Request"}
    assert COMPONENTS.describe(list[Reply]) == {"type": "array", "items": {"$ref": "#/components/schemas/Reply"}}


@pytest.mark.parametrize(
    ("pet", "is_read", "is_sent"),
    [
        ({"type": "cat", "name": "a"}, True, True),
        ({"type": "cat", "name": "a", "colour": "red"}, True, True),
        ({"type": "fish"}, True, True),
        ({"type": "dog", "id": "d", "pups": [{"type": "dog", "id": "e"}]}, True, True),
        ({"type": "hound", "id": "d"}, True, False),
        ({"id": "d"}, True, False),
        ({"type": None, "id": "d"}, True, False),
        ({"type": "cat", "crate": {"name": "a"}}, True, False),
        ("any", True, False),
        (None, True, False),
        ("none", True, True),
        ({"type": "cat"}, False, False),
        ({"type": "cat", "name": "a", "crate": 5}, False, False),
        ({"type": "dog", "id": "d", "pups": [{"type": "fish"}] * 3}, False, False),
        ({"id": "d", "role": "cat"}, False, False),
        ({}, False, False),
    ],
)
def test_union_field_is_lenient_when_read_and_strict_when_sent(pet: Any, is_read: bool, is_sent: bool) -> None:
    assert (fits(Request, {"pet": pet}), fits(Reply, {"pet": pet, "count": 0})) == (is_read, is_sent)


def test_sent_type_requires_all_fields_that_are_always_present() -> None:
    assert (COMPONENTS.schemas["Reply"]["required"], COMPONENTS.schemas["Dog"]["required"]) == (
        ["pet", "count"],
        ["type", "id"],
    )
