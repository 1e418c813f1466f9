"""Projects and their API keys over the admin API, with the official SDK."""

from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from antiphon.store.keys import StoredKey, compute_digest
from server.organization.conftest import ADA
from support.live_server import HttpResponse, LiveServer

Send = Callable[..., HttpResponse]
Admin = Callable[..., OpenAI]


def test_projects_of_settings_keys_and_api_are_listed(running: LiveServer, make_admin: Admin, send: Send) -> None:
    projects = make_admin().admin.organization.projects
    created = projects.create(name="New project")
    assert (created.id, created.name, created.status) == ("New project", "New project", "active")
    send("POST", "/organization/projects/New%20project/api_keys", {})
    running.wait_for(lambda: running.engine.key_store.save_key(StoredKey("key_1", b"d", "by-key", "", ("read",), 7)))
    listed = list(projects.list(limit=2))
    assert [(each.id, each.created_at) for each in listed] == [
        ("New project", created.created_at),
        ("ada", 0),
        ("by-key", 7),
        ("configured", 0),
        ("default", 0),
    ]
    assert projects.retrieve("by-key").object == "organization.project"
    assert projects.update("by-key", name="By key").name == "By key"
    assert (projects.retrieve("by-key").name, projects.retrieve("by-key").created_at) == ("By key", 7)


def test_key_is_created_listed_used_and_deleted(make_admin: Admin, send: Send) -> None:
    body = {"name": "laptop", "scopes": ["read"], "expires_in_seconds": 60}
    answer = send("POST", "/organization/projects/configured/api_keys", body)
    created = answer.json
    value = created.pop("value")
    assert (answer.headers["cache-control"], created["scopes"], created["name"]) == ("no-store", ["read"], "laptop")
    assert created["expires_at"] == created["created_at"] + 60
    assert send("GET", "/models", key=value).status == 200
    assert send("POST", "/responses", {"model": "scripted", "input": "hi"}, key=value).status == 403
    keys = make_admin().admin.organization.projects.api_keys
    (listed,) = keys.list("configured")
    assert (listed.id, listed.redacted_value, listed.owner.type) == (
        created["id"],
        "sk-antiphon-***",
        "service_account",
    )
    assert value not in listed.to_json()
    retrieved = keys.retrieve(created["id"], project_id="configured").to_dict()
    retrieved.pop("last_used_at", None)
    created.pop("last_used_at")
    assert retrieved == created
    assert keys.delete(created["id"], project_id="configured").deleted is True
    assert list(keys.list("configured")) == []
    assert send("DELETE", f"/organization/projects/configured/api_keys/{created['id']}").status == 404


def test_archived_project_loses_its_keys_and_gets_no_new_ones(make_admin: Admin, send: Send) -> None:
    projects = make_admin().admin.organization.projects
    projects.create(name="old")
    assert send("POST", "/organization/projects/old/api_keys", {}).status == 200
    archived = projects.archive("old")
    assert (archived.status, archived.archived_at is not None) == ("archived", True)
    assert projects.archive("old").archived_at == archived.archived_at
    assert send("GET", "/organization/projects/old/api_keys").json["data"] == []
    refused = send("POST", "/organization/projects/old/api_keys", {})
    assert (refused.status, refused.json["error"]["param"]) == (400, "project_id")
    assert "old" not in [each.id for each in projects.list()]
    assert "old" in [each.id for each in projects.list(include_archived=True)]
    assert send("POST", "/organization/projects", {"name": "old"}).status == 400


def test_pages_continue_after_a_deleted_key_or_archived_project(make_admin: Admin, send: Send) -> None:
    projects = make_admin().admin.organization.projects
    names = {f"paged-{number}" for number in range(3)}
    for name in names:
        projects.create(name=name)
    assert {each.id for each in projects.list(limit=1) if each.id in names and projects.archive(each.id)} == names
    created = {send("POST", "/organization/projects/configured/api_keys", {}).json["id"] for _ in range(3)}
    keys = projects.api_keys
    deleted = {each.id for each in keys.list("configured", limit=1) if keys.delete(each.id, project_id="configured")}
    assert deleted == created


@pytest.mark.parametrize("project", ["default", "ada"])
def test_project_with_keys_in_the_settings_is_not_archived(send: Send, project: str) -> None:
    refused = send("POST", f"/organization/projects/{project}/archive")
    assert (refused.status, refused.json["error"]["param"]) == (400, "project_id")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/organization/projects", {}, "name", "missing_required_parameter"),
        ("/organization/projects", {"name": " "}, "name", "invalid_value"),
        ("/organization/projects", {"name": "a\nb"}, "name", "invalid_value"),
        ("/organization/projects", {"name": "x" * 257}, "name", "invalid_value"),
        ("/organization/projects", {"name": "ada"}, "name", "invalid_value"),
        ("/organization/projects/ada/api_keys", {"scopes": ["root"]}, "scopes[0]", "invalid_value"),
        ("/organization/projects/ada/api_keys", {"scopes": []}, "scopes", "invalid_value"),
        ("/organization/projects/ada/api_keys", {"expires_in_seconds": 0}, "expires_in_seconds", "invalid_value"),
        ("/organization/projects/ada/api_keys", {"name": "\x00"}, "name", "invalid_value"),
        ("/organization/projects/ada/api_keys", {"expires_in": 60}, "expires_in", "unknown_parameter"),
    ],
)
def test_invalid_body_is_refused_with_its_field(
    send: Send, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    answer = send("POST", path, body)
    assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("path", "param"),
    [("/organization/projects?after=nothing", "after"), ("/organization/projects/ada/api_keys?limit=0", "limit")],
)
def test_invalid_page_is_refused_with_its_parameter(send: Send, path: str, param: str) -> None:
    answer = send("GET", path)
    assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (400, param, "invalid_value")


def test_settings_key_of_a_project_administers_only_that_project(make_admin: Admin, send: Send) -> None:
    projects = make_admin(ADA).admin.organization.projects
    assert [each.id for each in projects.list()] == ["ada"]
    assert send("POST", "/organization/projects/ada/api_keys", {}, key=ADA).status == 200
    refused = [
        send("POST", "/organization/projects", {"name": "more"}, key=ADA),
        send("POST", "/organization/projects/ada/api_keys", {"scopes": ["admin"]}, key=ADA),
    ]
    assert [(each.status, each.json["error"]["code"]) for each in refused] == [(403, "insufficient_scope")] * 2
    assert send("GET", "/organization/projects/configured", key=ADA).status == 404
    assert send("POST", "/organization/projects/configured/api_keys", {}, key=ADA).status == 404


def test_stored_admin_key_administers_all_projects(running: LiveServer, make_admin: Admin) -> None:
    key = StoredKey("key_1", compute_digest(b"sk-admin"), "ops", "", ("admin",), 7)
    running.wait_for(lambda: running.engine.key_store.save_key(key))
    projects = make_admin("sk-admin").admin.organization.projects
    assert [each.id for each in projects.list()] == ["ada", "configured", "default", "ops"]
