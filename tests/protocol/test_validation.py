import pytest
from msgspec import ValidationError

from antiphon.errors import InvalidRequest
from antiphon.protocol.validation import FieldError, parse_error, remove_field


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Expected `int`, got `str`", FieldError("", "Expected `int`, got `str`")),
        ("Wrong - at `$.a[0].b`", FieldError("a[0].b", "Wrong")),
        ("Wrong - at `$.c` - at `$[1]` - at `$.a`", FieldError("a[1].c", "Wrong")),
        ("Wrong - at `$[...]` - at `$.a`", FieldError("a[...]", "Wrong")),
        ("Wrong - at `key` in `$.a`", FieldError("a", "Wrong")),
        ("Invalid enum value 'x - at `$.b`' - at `$.a`", FieldError("a", "Invalid enum value 'x - at `$.b`'")),
        ("Object contains unknown field `x`", FieldError("", "Object contains unknown field `x`")),
        ("Wrong - at `$.no path`", FieldError("", "Wrong - at `$.no path`")),
    ],
)
def test_error_is_split_into_path_and_reason(message: str, error: FieldError) -> None:
    assert parse_error(ValidationError(message)) == error


def test_field_is_removed_from_all_similar_objects() -> None:
    body = (
        b'{"in":[{"type":"a", "of":{"x":1,"y": 2.0}}, {"type":"b","of":{"x":1}}, {"of":{"x":1}}, 5, "x\\"x", '
        b'{"type":"a","of":[1, {"x":1}]}, {"type":"a","of":{"\\u0078":[1, 2]}}, {"type":"a","of":{ "y":"z"}}]}'
    )
    rest = (
        b'{"in":[{"type":"a","of":{"y":2.0}},{"type":"b","of":{"x":1}},{"of":{"x":1}},5,"x\\"x",'
        b'{"type":"a","of":[1, {"x":1}]},{"type":"a","of":{}},{"type":"a","of":{ "y":"z"}}]}'
    )
    assert remove_field(body, "in[0].of", "x") == (rest, ["in[0].of.x", "in[6].of.x"])


def test_top_level_field_is_removed() -> None:
    assert remove_field(b'{"x":1,"y": [1, 2]}', "", "x") == (b'{"y":[1, 2]}', ["x"])


@pytest.mark.parametrize("path", ["", "in", "in[1]", "in[0].of", "in[0][0]", "other"])
def test_field_that_cannot_be_located_is_rejected(path: str) -> None:
    with pytest.raises(InvalidRequest, match="Unknown parameter: 'x'"):
        remove_field(b'{"in":[{"y":"x"}]}', path, "x")
