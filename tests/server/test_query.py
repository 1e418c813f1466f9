from typing import Any

import pytest

from antiphon.errors import InvalidRequest
from antiphon.server.organization.usage import UsageQuery
from antiphon.server.query import ItemQuery, NoQuery, PageQuery, ResponseQuery, read_query


@pytest.mark.parametrize(
    ("text", "query"),
    [
        (b"", PageQuery()),
        (b"after=&limit=7&order=asc", PageQuery(after="", limit=7, order="asc")),
        (b"limit=5&limit=6", PageQuery(limit=6)),
        (
            b"include[]=reasoning.encrypted_content&include=message.output_text.logprobs",
            PageQuery(include=["reasoning.encrypted_content", "message.output_text.logprobs"]),
        ),
        (b"stream=true&starting_after=0", ResponseQuery(stream=True, starting_after=0)),
        (b"stream=false&include_obfuscation=true", ResponseQuery(include_obfuscation=True)),
        (
            b"start_time=7&group_by=model,project_id&group_by[]=api_key_id&models=a,b",
            UsageQuery(start_time=7, group_by=["model", "project_id", "api_key_id"], models=["a,b"]),
        ),
    ],
)
def test_query_is_parsed_into_its_struct(make_channel: Any, text: bytes, query: Any) -> None:
    assert read_query(make_channel().make_request(query=text), type(query)) == query


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b"limit=0", "limit"),
        (b"limit=101", "limit"),
        (b"limit=ten", "limit"),
        (b"order=up", "order"),
        (b"include=reasoning.encrypted_content&include=everything", "include"),
        (b"%ff=1", None),
        (b"\xff", None),
        (b"&".join([b"a=1"] * 101), None),
    ],
)
def test_invalid_query_names_the_parameter(make_channel: Any, text: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_query(make_channel().make_request(query=text), PageQuery)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "wants"),
    [(b"", False), (b"include=message.input_image.image_url", False), (b"include=reasoning.encrypted_content", True)],
)
def test_include_requests_encrypted_reasoning(make_channel: Any, text: bytes, wants: bool) -> None:
    assert read_query(make_channel().make_request(query=text), ItemQuery).wants_seals == wants


def test_operation_without_parameters_ignores_all_with_a_warning(make_channel: Any) -> None:
    http_request = make_channel().make_request(query=b"limit=3&depth=2")
    read_query(http_request, NoQuery)
    assert http_request.warnings == ["ignored: limit, depth"]


def test_unknown_parameters_are_ignored_with_a_warning(make_channel: Any) -> None:
    http_request = make_channel().make_request(query=b"limit=3&depth=2&stream=true")
    assert read_query(http_request, PageQuery) == PageQuery(limit=3)
    assert http_request.warnings == ["ignored: depth, stream"]
