"""The parser of forms: any split of the body gives the same parts."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import InvalidRequest
from antiphon.server.multipart import MultipartReader, nest_fields

BODY = (
    b'--b1\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b1\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\n'
    b"one\r\n--b\r\n--B1\r\ntwo\r\n--b1--\r\n"
)


def read(pieces: list[bytes], boundary: bytes = b"b1") -> tuple[list[tuple[dict[str, str], bytes]], bool]:
    reader = MultipartReader(boundary)
    parts: list[Any] = []
    for piece in pieces:
        for kind, value in reader.feed(piece):
            if kind == "part":
                parts.append((value, bytearray()))
            elif kind == "data":
                parts[-1][1].extend(value)
    return [(headers, bytes(content)) for headers, content in parts], reader.is_complete


@given(st.lists(st.integers(0, len(BODY)), max_size=8))
def test_split_of_the_body_does_not_matter(cuts: list[int]) -> None:
    points = [0, *sorted(cuts), len(BODY)]
    pieces = [BODY[start:end] for start, end in itertools.pairwise(points)]
    parts, is_complete = read(pieces)
    assert is_complete
    assert parts == [
        ({"content-disposition": 'form-data; name="purpose"'}, b"batch"),
        (
            {"content-disposition": 'form-data; name="file"; filename="a.txt"', "content-type": "text/plain"},
            b"one\r\n--b\r\n--B1\r\ntwo",
        ),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"--b1 x\r\n\r\n",
        b"--b1\r\nName: " + b"a" * 20_000,
        b"--b1" + b" " * 20_000,
        b"--b1\r\n\r\n\r\n" * 200,
    ],
)
def test_malformed_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read([body])
    assert caught.value.code == "invalid_form"


def test_incomplete_form_is_not_complete() -> None:
    assert not read([BODY[:-6]])[1]


def test_bracketed_names_are_nested() -> None:
    fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600", "a[": "x"}
    assert nest_fields(fields) == {
        "purpose": "batch",
        "expires_after": {"anchor": "created_at", "seconds": "3600"},
        "a[": "x",
    }
    with pytest.raises(InvalidRequest):
        nest_fields({"a": "x", "a[b]": "y"})
