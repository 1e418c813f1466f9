"""Implemented endpoints."""

import re
from typing import Any

from manifest import names


def shorten(path: str) -> str:
    return path.removeprefix("/v1").replace("{response_id}", "{id}").replace("{conversation_id}", "{id}")


def hide_names(endpoint: str) -> str:
    return re.sub(r"\{\w+\}", "{}", endpoint)


def test_implemented_endpoints_equal_the_openapi_document(server: Any) -> None:
    paths = server.ask("GET", "/openapi.json").json["paths"]
    described = {
        f"{'WS' if '101' in operation['responses'] else method.upper()} {shorten(path)}"
        for path, methods in paths.items()
        for method, operation in methods.items()
    }
    families = ("/responses", "/conversations")
    assert {each for each in described if each.split()[1].startswith(families)} == set(
        names("endpoints", "implemented")
    )
    families = ("/files", "/uploads", "/vector_stores", "/containers")
    assert {hide_names(each) for each in described if each.split()[1].startswith(families)} == {
        hide_names(each) for each in names("hosted_endpoints", "implemented")
    }
    assert {hide_names(each) for each in described if each.split()[1].startswith("/organization")} == {
        hide_names(each) for each in names("organization_endpoints", "implemented")
    }
