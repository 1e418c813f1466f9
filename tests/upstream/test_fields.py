"""Tool-call arguments, annotations, log probabilities and the name of the model that answered."""

from typing import Any

import pytest

from antiphon.errors import UpstreamError
from antiphon.protocol.content import (
    Annotation,
    ContainerFileCitation,
    FileCitation,
    FilePath,
    LogProb,
    TopLogProb,
    UrlCitation,
)
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Delta, Served, Text
from antiphon.upstream.fields import (
    MAX_LIST_LENGTH,
    MAX_NAME_LENGTH,
    ServedModel,
    normalize_arguments,
    parse_annotation,
    parse_logprobs,
    read_list,
)


@pytest.mark.parametrize("arguments", ["{}", '{ "b":1.0,"a" : 1e2, "c":"\\u0041" }'])
def test_object_arguments_stay_unchanged(arguments: str) -> None:
    assert normalize_arguments(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ("null", '{"arguments":"null"}'),
        ("[1]", '{"arguments":"[1]"}'),
        ('{"a":', r'{"arguments":"{\"a\":"}'),
        ('{"a":NaN}', r'{"arguments":"{\"a\":NaN}"}'),
        ("{}{}", '{"arguments":"{}{}"}'),
    ],
)
def test_other_arguments_are_wrapped_in_an_object(arguments: str, written: str) -> None:
    assert normalize_arguments(arguments) == written


def test_truncated_arguments_are_wrapped() -> None:
    assert normalize_arguments('{"a":' * 100_000).startswith('{"arguments":"')


URL = "https://a.example"


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("kind", "fields", "parsed"),
    [
        ("url_citation", {"url": URL}, UrlCitation(URL, "", 0, 0)),
        (
            "url_citation",
            {"url": URL, "title": None, "start_index": "1", "end_index": True},
            UrlCitation(URL, "", 0, 0),
        ),
        ("url_citation", {"url": URL, "title": "A", "start_index": 1, "end_index": 2}, UrlCitation(URL, "A", 1, 2)),
        ("file_citation", {"file_id": "file_1"}, FileCitation("file_1", "", 0)),
        ("container_file_citation", {"file_id": "f", "end_index": 3}, ContainerFileCitation("", "f", "", 0, 3)),
        ("file_path", {"file_id": "file_1", "index": None}, FilePath("file_1", 0)),
    ],
)
def test_missing_fields_of_an_annotation_are_empty(
    kind: str, fields: dict[str, Any], parsed: Annotation, is_nested: bool
) -> None:
    assert parse_annotation({"type": kind} | ({kind: fields} if is_nested else fields)) == parsed


@pytest.mark.parametrize("payload", [None, "x", {}, {"type": 1}])
def test_annotation_without_a_type_is_none(payload: Any) -> None:
    assert parse_annotation(payload) is None


def test_annotation_of_an_unknown_type_stays_unchanged() -> None:
    assert parse_annotation({"type": "file", "file": {"hash": "h"}}) == Unknown(b'{"type":"file","file":{"hash":"h"}}')


YES = {"token": "Yes", "logprob": -0.25}
BYTES = [89, 101, 115]


@pytest.mark.parametrize(
    ("payload", "read"),
    [
        (None, ()),
        ({"content": []}, ()),
        ([], ()),
        ([YES | {"bytes": BYTES, "top_logprobs": []}], (LogProb("Yes", -0.25, BYTES, []),)),
        ([YES], (LogProb("Yes", -0.25, BYTES, []),)),
        ([YES | {"bytes": ["Y"], "top_logprobs": None}], (LogProb("Yes", -0.25, BYTES, []),)),
        ([YES | {"top_logprobs": [YES, "No"]}], (LogProb("Yes", -0.25, BYTES, [TopLogProb("Yes", -0.25, BYTES)]),)),
        (["Yes", {"token": "Yes"}, {"token": None, "logprob": 0}, {"logprob": -1}], ()),
    ],
)
def test_logprobs_are_parsed(payload: Any, read: tuple[LogProb, ...]) -> None:
    assert parse_logprobs(payload) == read


WORDS: list[Delta] = [Text("Hi.")]


def announce(*names: Any) -> Any:
    served_model = ServedModel("router", "auto")
    for name in names:
        served_model.observe(name)
    return served_model.announce(WORDS)


def test_other_model_name_is_announced_first() -> None:
    assert announce(None, "acme/model-1") == [Served("auto", "router", "acme/model-1"), *WORDS]


@pytest.mark.parametrize("name", [None, "", "auto", 5, {"id": "x"}, "a\nb", "x" * (MAX_NAME_LENGTH + 1)])
def test_same_or_invalid_model_name_is_not_announced(name: Any) -> None:
    assert announce(name) == WORDS


def test_last_model_name_is_announced() -> None:
    assert announce("acme/model-1", "acme/model-2")[0] == Served("auto", "router", "acme/model-2")


@pytest.mark.parametrize(("payload", "entries"), [([1, "a"], [1, "a"]), (None, []), ({"a": 1}, []), ("ab", [])])
def test_list_is_read_and_other_values_are_empty(payload: Any, entries: list[Any]) -> None:
    assert read_list(payload) == entries


def test_list_with_too_many_entries_is_an_error() -> None:
    assert len(read_list([0] * MAX_LIST_LENGTH)) == MAX_LIST_LENGTH
    with pytest.raises(UpstreamError, match="more than 10000 entries") as caught:
        read_list([0] * (MAX_LIST_LENGTH + 1))
    assert caught.value.code == "answer_too_large"
