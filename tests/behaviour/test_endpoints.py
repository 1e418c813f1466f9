"""Which endpoints there are."""

from typing import Any

import pytest

from manifest import names


def plain(path: str) -> str:
    return path.removeprefix("/v1").replace("{response_id}", "{id}").replace("{conversation_id}", "{id}")


def test_the_implemented_ones_are_those_that_the_document_describes(server: Any) -> None:
    paths = server.ask("GET", "/openapi.json").json["paths"]
    described = {f"{method.upper()} {plain(path)}" for path, methods in paths.items() for method in methods}
    families = ("/responses", "/conversations")
    assert {each for each in described if each.split()[1].startswith(families)} == set(
        names("endpoints", "implemented")
    )


@pytest.mark.parametrize("name", [name for name in names("endpoints", "planned") if not name.startswith("WS")])
def test_a_planned_endpoint_is_refused_as_such(server: Any, name: str) -> None:
    method, path = name.split()
    answer = server.ask(method, f"/v1{path}", {"model": "scripted", "input": "hi"})
    assert (answer.status, answer.json["error"]["code"]) == (405, "method_not_allowed")
