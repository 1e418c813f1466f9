"""The usage and the costs over the admin API, with the official SDK."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from antiphon.store.usage import DAY, HOUR, MINUTE, UsageRow
from server.organization.conftest import ADA, ROOT
from support.live_server import HttpResponse, LiveServer

Send = Callable[..., HttpResponse]
Admin = Callable[..., OpenAI]
START = 1_700_006_400  # 2023-11-15 00:00 UTC


def add(running: LiveServer, *rows: UsageRow) -> None:
    running.wait_for(lambda: running.engine.admin_store.add_usage(rows, write_id=secrets.token_hex(16)))


def make_row(
    offset: int, *, project: str = "ada", key_id: str = "key_1", model: str = "m", tokens: int = 10
) -> UsageRow:
    return UsageRow(START + offset, project, key_id, model, 1, tokens, 2, 5, 0.5)


def get_results(page: Any) -> list[list[dict[str, Any]]]:
    """Return the results of each bucket without null fields and the object type."""
    return [
        [
            {name: value for name, value in result.to_dict().items() if value is not None and name != "object"}
            for result in bucket.results
        ]
        for bucket in page.data
    ]


def test_response_is_counted_at_once_for_its_project_key_and_model(make_admin: Admin, send: Send) -> None:
    for key, model in ((ROOT, "scripted"), (ADA, "scripted"), (ADA, "scripted"), (ADA, "other")):
        assert send("POST", "/responses", {"model": model, "input": "hi"}, key=key).status == 200
    start = int(time.time()) - HOUR
    usage = make_admin().admin.organization.usage
    page = usage.completions(start_time=start, group_by=["project_id", "api_key_id", "model"], bucket_width="1d")
    (results,) = [results for results in get_results(page) if results]
    one = {"input_tokens": 1, "output_tokens": 3, "input_cached_tokens": 0, "num_model_requests": 1}
    silent = {"input_audio_tokens": 0, "output_audio_tokens": 0}
    ada = {"project_id": "ada", "api_key_id": "settings-2"}
    twice = {"input_tokens": 2, "output_tokens": 6, "input_cached_tokens": 0, "num_model_requests": 2}
    assert results == [
        {**one, **silent, **ada, "model": "other"},
        {**twice, **silent, **ada, "model": "scripted"},
        {**one, **silent, "project_id": "default", "api_key_id": "root", "model": "scripted"},
    ]
    costs = usage.costs(start_time=start, group_by=["project_id"])
    (amounts,) = [bucket.results for bucket in costs.data if bucket.results]
    assert [(each.project_id, each.amount.value, each.amount.currency) for each in amounts] == [
        ("ada", 14.0, "usd"),
        ("default", 7.0, "usd"),
    ]


def test_usage_is_paged_in_aligned_buckets(running: LiveServer, make_admin: Admin) -> None:
    add(running, make_row(0), make_row(30 * MINUTE), make_row(2 * HOUR, tokens=7))
    usage = make_admin().admin.organization.usage
    query: dict[str, Any] = {"start_time": START + 100, "end_time": START + 3 * HOUR + 5, "bucket_width": "1h"}
    first = usage.completions(**query, limit=2)
    assert [(each.start_time, each.end_time) for each in first.data] == [
        (START, START + HOUR),
        (START + HOUR, START + 2 * HOUR),
    ]
    assert [[each["input_tokens"] for each in results] for results in get_results(first)] == [[20], []]
    second = usage.completions(**query, limit=2, page=first.next_page)
    assert [(each.start_time, each.end_time) for each in second.data] == [
        (START + 2 * HOUR, START + 3 * HOUR),
        (START + 3 * HOUR, START + 3 * HOUR + 5),
    ]
    assert [[each["input_tokens"] for each in results] for results in get_results(second)] == [[7], []]
    assert (first.has_more, second.has_more, second.next_page) == (True, False, None)


@pytest.mark.parametrize(("width", "count"), [("1m", 60), ("1h", 24), ("1d", 7)])
def test_page_has_the_default_number_of_buckets(make_admin: Admin, width: Any, count: int) -> None:
    page = make_admin().admin.organization.usage.completions(start_time=START, bucket_width=width)
    assert (len(page.data), page.has_more, page.object) == (count, True, "page")


@pytest.mark.parametrize(
    ("selection", "tokens"),
    [
        ({"project_ids": ["ada"]}, 11),
        ({"project_ids": ["ada", "bob"], "models": ["m"]}, 101),
        ({"api_key_ids": ["key_2"]}, 100),
        ({"models": ["n"]}, 10),
        ({"project_ids": ["nobody"]}, 0),
        ({"user_ids": ["ada"]}, 0),
        ({"batch": True}, 0),
        ({"batch": False}, 111),
        ({}, 111),
    ],
)
def test_usage_is_selected(running: LiveServer, make_admin: Admin, selection: dict[str, Any], tokens: int) -> None:
    add(
        running,
        make_row(0, tokens=1),
        make_row(0, tokens=10, model="n"),
        make_row(0, tokens=100, project="bob", key_id="key_2"),
    )
    page = make_admin().admin.organization.usage.completions(start_time=START, end_time=START + DAY, **selection)
    assert sum(each["input_tokens"] for results in get_results(page) for each in results) == tokens


def test_usage_is_grouped_by_every_documented_field(running: LiveServer, make_admin: Admin) -> None:
    add(running, make_row(0, tokens=1), make_row(0, tokens=10, model="n"), make_row(0, tokens=100, project="bob"))
    usage = make_admin().admin.organization.usage
    constants = {"user_id": None, "batch": False, "service_tier": "default"}
    names: Any = ["user_id", "model", "batch", "project_id", "service_tier"]
    page = usage.completions(start_time=START, end_time=START + DAY, group_by=names)
    found = [{name: each.get(name) for name in (*names, "input_tokens")} for each in get_results(page)[0]]
    assert found == [
        constants | {"project_id": "ada", "model": "m", "input_tokens": 1},
        constants | {"project_id": "bob", "model": "m", "input_tokens": 100},
        constants | {"project_id": "ada", "model": "n", "input_tokens": 10},
    ]
    page = usage.completions(start_time=START, end_time=START + DAY, group_by=["batch"])
    assert [(each["batch"], each.get("model"), each["input_tokens"]) for each in get_results(page)[0]] == [
        (False, None, 111)
    ]


@pytest.mark.parametrize(
    ("path", "query", "choices"),
    [
        ("usage/completions", "bucket_width=1w", "1m, 1h, 1d"),
        ("usage/completions", "group_by=x", "project_id, user_id, api_key_id, model, batch, service_tier"),
        ("costs", "bucket_width=1h", "1d"),
        ("costs", "group_by=model", "project_id, api_key_id, line_item"),
    ],
)
def test_refusal_of_a_choice_names_the_allowed_ones(send: Send, path: str, query: str, choices: str) -> None:
    answer = send("GET", f"/organization/{path}?start_time=5&{query}")
    name, _, value = query.partition("=")
    supported = ", ".join(f"'{choice}'" for choice in choices.split(", "))
    message = f"Invalid value for '{name}': Invalid enum value '{value}'. Supported values are: {supported}."
    assert (answer.status, answer.json["error"]["message"]) == (400, message)


def test_costs_are_grouped_by_model_as_line_item(running: LiveServer, make_admin: Admin) -> None:
    add(running, make_row(0), make_row(MINUTE), make_row(0, model="n"))
    page = make_admin().admin.organization.usage.costs(start_time=START, end_time=START + DAY, group_by=["line_item"])
    assert [(each.line_item, each.amount.value) for each in page.data[0].results] == [("m", 1.0), ("n", 0.5)]


def test_settings_key_of_a_project_sees_only_its_usage(running: LiveServer, make_admin: Admin) -> None:
    add(running, make_row(0, tokens=1), make_row(0, project="bob", tokens=10))
    usage = make_admin(ADA).admin.organization.usage
    for selection in ({}, {"project_ids": ["ada", "bob"]}):
        page = usage.completions(start_time=START, end_time=START + DAY, group_by=["project_id"], **selection)
        assert [(each["project_id"], each["input_tokens"]) for each in get_results(page)[0]] == [("ada", 1)]
    assert len(usage.costs(start_time=START, end_time=START + DAY, group_by=["project_id"]).data[0].results) == 1


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("", "start_time", "missing_required_parameter"),
        ("start_time=x", "start_time", "invalid_type"),
        ("start_time=-1", "start_time", "invalid_value"),
        ("start_time=5&end_time=5", "end_time", "invalid_value"),
        ("start_time=5&bucket_width=2h", "bucket_width", "invalid_value"),
        ("start_time=5&group_by=month", "group_by", "invalid_value"),
        ("start_time=5&batch=maybe", "batch", "invalid_type"),
        ("start_time=5&limit=32", "limit", "integer_above_max_value"),
        ("start_time=5&page=next", "page", "invalid_value"),
        ("start_time=5&page=page_1", "page", "invalid_value"),
        ("start_time=5&page=page_99999999999999999999", "page", "invalid_value"),
    ],
)
def test_invalid_query_is_refused_with_its_parameter(send: Send, query: str, param: str, code: str) -> None:
    answer = send("GET", f"/organization/usage/completions?{query}")
    assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (400, param, code)
