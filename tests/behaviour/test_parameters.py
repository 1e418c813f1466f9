"""Parameters of a create call."""

from typing import Any

import pytest

from antiphon.protocol.response import Response
from behaviour.samples import ECHOES, FUNCTION, FUNCTION_ECHO, PARAMETERS, SCHEMA
from behaviour.upstreams import ask_through
from behaviour.wire import ask, get, refuse
from manifest import names

SUPPORTED = [name for name in names("parameters", "implemented", "accepted") if name in PARAMETERS]
ECHOED = [name for name in SUPPORTED if name in Response.__struct_encode_fields__]


@pytest.mark.parametrize("name", ECHOED)
def test_parameter_is_echoed(server: Any, name: str) -> None:
    response = ask(server, "hi", **{name: PARAMETERS[name]})
    assert response[name] == ECHOES.get(name, PARAMETERS[name])
    if response["store"]:
        assert get(server, f"/responses/{response['id']}")[name] == response[name]


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name not in ECHOED])
def test_parameter_without_an_echo_is_accepted(server: Any, name: str) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", name: PARAMETERS[name]})
    assert (answer.status, answer.headers.get("x-antiphon-warnings")) == (200, None)


@pytest.mark.parametrize(
    ("kind", "forwarded", "warning"),
    [
        ("anthropic_messages", None, "no effect on this model: client_metadata"),
        ("chat_completions", None, "no effect on this model: client_metadata"),
        ("responses", {"session": "s"}, None),
    ],
)
async def test_client_metadata_is_forwarded_or_reported_as_ignored(
    kind: str, forwarded: Any, warning: str | None
) -> None:
    answer, [sent] = await ask_through(kind, "hi", client_metadata={"session": "s"})
    assert (answer.status, sent.get("client_metadata"), answer.headers.get("x-antiphon-warnings")) == (
        200,
        forwarded,
        warning,
    )


@pytest.mark.parametrize("name", names("parameters", "refused"))
def test_unsupported_parameter_is_rejected_by_name(server: Any, name: str) -> None:
    assert refuse(server, {name: PARAMETERS[name]}) == (400, name, "unsupported_parameter")


def test_unknown_parameter_is_reported_in_a_header(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", "acme": 1})
    assert (answer.status, answer.headers["x-antiphon-warnings"]) == (200, "ignored: acme")


def test_tools_are_inherited_unless_the_request_has_its_own(server: Any) -> None:
    first = ask(server, "hi", tools=[FUNCTION])
    inheriting = ask(server, "hi", previous_response_id=first["id"])
    without = ask(server, "hi", previous_response_id=inheriting["id"], tools=[])
    assert (inheriting["tools"], without["tools"]) == ([FUNCTION_ECHO], [])


FORMATS: dict[str, Any] = {"text": {"type": "text"}, "json_object": {"type": "json_object"}, "json_schema": SCHEMA}


@pytest.mark.parametrize("name", names("formats", "implemented"))
def test_format_is_accepted_and_echoed(server: Any, name: str) -> None:
    blank = {"description": None} if name == "json_schema" else {}
    assert ask(server, "hi", text={"format": FORMATS[name]})["text"]["format"] == FORMATS[name] | blank


def test_unset_echo_is_null(server: Any) -> None:
    response = ask(server, "hi", text={"format": SCHEMA})
    assert (response["safety_identifier"], response["prompt_cache_key"]) == (None, None)
    assert response["text"]["format"]["description"] is None
