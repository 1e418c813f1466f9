"""Any body is either decoded or rejected with InvalidRequest, with a param path that exists in the body."""

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import InvalidRequest, MissingParameter
from antiphon.protocol.codec import decode_request, encode
from antiphon.protocol.request import CreateRequest
from support import strategies


def look_up(value: Any, path: str) -> Any:
    for name, index in re.findall(r"\.?(\w+)|\[(\d+)\]", path):
        value = value[int(index)] if index else value[name]
    return value


def decode_error(body: bytes) -> InvalidRequest | None:
    try:
        decode_request(body)
    except InvalidRequest as error:
        return error
    return None


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def check_outcome(body: bytes) -> None:
    error = decode_error(body)
    if error is None or error.param is None or not is_json(body):  # an invalid value may precede the malformed end
        return
    if isinstance(error, MissingParameter):
        parent, _, name = error.param.rpartition(".")
        assert look_up(json.loads(body), parent).get(name) is None
    else:
        look_up(json.loads(body), error.param)


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_invalid_request(body: bytes) -> None:
    check_outcome(body)


@given(strategies.json_values())
def test_random_json_raises_only_invalid_request(value: Any) -> None:
    check_outcome(json.dumps(value).encode())


@given(st.dictionaries(st.sampled_from(CreateRequest.__struct_fields__), strategies.json_values(), max_size=4))
def test_random_parameters_raise_only_invalid_request(value: Any) -> None:
    check_outcome(json.dumps(value).encode())


@given(strategies.damaged(strategies.requests()))
def test_damaged_request_raises_only_invalid_request(value: Any) -> None:
    check_outcome(json.dumps(value).encode())


@given(strategies.requests(), st.data())
def test_damaged_bytes_raise_only_invalid_request(request: CreateRequest, data: st.DataObject) -> None:
    body = encode(request)
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, min(len(body), start + 3)))
    decode_error(
        body[:start] + data.draw(st.binary(max_size=3)) + body[end:]
    )  # the path is not checked: the body may not be JSON
