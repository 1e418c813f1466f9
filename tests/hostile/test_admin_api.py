"""Hostile requests to the admin API and in rarely used fields: each is refused or served within bounds."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.loop_blocks import MAX_BLOCK
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MAX_GROWTH_MB = 150
USAGE = "/v1/organization/usage/completions"
PROJECTS = "/v1/organization/projects"
RESPONSES = "/v1/responses"


@pytest.fixture
def server(victim: Callable[..., Victim]) -> Iterator[Victim]:
    running = victim(script={"default": "Hi."})
    before = running.rss_mb()
    yield running
    assert running.ask("POST", RESPONSES, {"model": "scripted", "input": "x"}).status == 200
    assert running.peak_mb() - before < MAX_GROWTH_MB
    assert running.longest_block() < MAX_BLOCK, running.log()
    assert "Traceback" not in running.log()


def test_hostile_queries_of_the_admin_api_are_refused(server: Victim) -> None:
    many = "&".join(["group_by=model"] * 3000)
    queries = {
        f"{USAGE}?start_time=0&limit=999999": 400,
        f"{USAGE}?start_time=-5": 400,
        f"{USAGE}?start_time={2**80}": 400,
        f"{USAGE}?start_time=0&bucket_width=1m&limit=1440": 200,
        f"{USAGE}?start_time=0&{many}": 400,
        f"{USAGE}?start_time=0&{'&'.join(f'project_ids=p{number}' for number in range(3000))}": 400,
        f"{USAGE}?start_time=0&page={'z' * 10_000}": 400,
        f"/v1/organization/costs?start_time=1&limit=181&{many}": 400,
        f"{PROJECTS}?limit=999999": 400,
        f"{PROJECTS}?after={'x' * 10_000}": 400,
        f"{PROJECTS}/{'x' * 10_000}/api_keys": 404,
    }
    assert {query: server.ask("GET", query).status for query in queries} == queries


def test_hostile_bodies_of_the_admin_api_are_refused(server: Victim) -> None:
    keys = f"{PROJECTS}/default/api_keys"
    assert server.ask("POST", PROJECTS, {"name": "x" * 5_000_000}).status == 400
    assert server.ask("POST", PROJECTS, b'{"name":' + b"[" * 400_000).status == 400
    assert server.ask("POST", keys, {"scopes": ["root"] * 100_000}).status == 400
    assert server.ask("POST", keys, {"expires_in_seconds": 10**30}).status == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"include": ["reasoning.encrypted_content"] * 200_000}, 200),
        ({"include": [f"x{number}" for number in range(100_000)]}, 400),
        ({"metadata": {f"k{number}": "v" for number in range(100_000)}}, 400),
        ({"stream_options": {f"k{number}": 1 for number in range(10_000)}, "stream": True}, 400),
        ({"user": "u" * 5_000_000, "safety_identifier": "s" * 5_000_000}, 400),
        ({"model": "m" * 5_000_000}, 400),
        ({"tools": [{"type": "file_search", "vector_store_ids": [f"vs_{n}" for n in range(100_000)]}]}, 200),
        ({"tools": [{"type": "web_search", "filters": {"allowed_domains": ["a." * 20_000] * 90}}]}, 200),
    ],
    ids=["include", "unknown include", "metadata", "stream options", "user", "model", "vector stores", "domains"],
)
@pytest.mark.slow
def test_hostile_fields_of_a_request_stay_within_bounds(server: Victim, fields: dict[str, Any], status: int) -> None:
    assert server.ask("POST", RESPONSES, {"model": "scripted", "input": "x"} | fields).status == status


@pytest.mark.slow
def test_hostile_headers_and_templates_stay_within_bounds(server: Victim) -> None:
    state = ",".join(f"k{number}=v" for number in range(9000))
    headers = {"traceparent": "00-" + "a" * 60_000, "tracestate": state}
    body = {"model": "scripted", "input": "x"}
    assert server.ask("POST", RESPONSES, body, headers=headers).status == 200
    for text in ("{{" * 1_000_000, "{{" + "a" * 3_000_000):
        template = {"template": {"model": "scripted", "instructions": text}}
        assert server.ask("POST", "/v1/prompts", template).status == 200
    deep = json.loads('{"type":"and","filters":[' * 300 + '{"type":"eq","key":"a","value":1}' + "]}" * 300)
    query = {"query": "x", "filters": deep}
    assert server.ask("POST", "/v1/vector_stores/vs_x/search", query).status in (400, 404)
