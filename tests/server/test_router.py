from typing import Any
from urllib.parse import unquote

import pytest

from antiphon.errors import MethodNotAllowed, NotFound
from antiphon.server.http import HttpRequest
from antiphon.server.query import PageQuery
from antiphon.server.router import Operation, Route, Router


async def plain(http_request: HttpRequest) -> None: ...


async def one(http_request: HttpRequest) -> None: ...


async def parts(http_request: HttpRequest) -> None: ...


async def part(http_request: HttpRequest) -> None: ...


async def rest(http_request: HttpRequest) -> None: ...


@pytest.fixture(scope="module")
def router() -> Router:
    router = Router()
    router.add("POST", "/things", plain)
    router.add("GET", "/things/{id}", one)
    router.add("DELETE", "/things/{id}", plain)
    router.add("GET", "/things/{id}/parts", parts)
    router.add("DELETE", "/things/{id}/parts/{part_id}", part)
    router.add("GET", "/files/{path...}", rest, public=True)
    return router


@pytest.mark.parametrize(
    ("method", "path", "handler", "params", "public", "pattern"),
    [
        ("POST", "/things", plain, (), False, "/things"),
        ("GET", "/things/7", one, ("7",), False, "/things/{id}"),
        ("HEAD", "/things/7", one, ("7",), False, "/things/{id}"),
        ("DELETE", "/things/7", plain, ("7",), False, "/things/{id}"),
        ("GET", "/things/parts", one, ("parts",), False, "/things/{id}"),
        ("GET", "/things/7/parts", parts, ("7",), False, "/things/{id}/parts"),
        ("DELETE", "/things/7/parts/8", part, ("7", "8"), False, "/things/{id}/parts/{part_id}"),
        ("GET", "/things/a.b?c/parts", parts, ("a.b?c",), False, "/things/{id}/parts"),
        ("GET", "/things/a\nb", one, ("a\nb",), False, "/things/{id}"),
        ("GET", "/things/50%25", one, ("50%25",), False, "/things/{id}"),
        ("GET", "/things/ä", one, ("ä",), False, "/things/{id}"),
        ("GET", "/files/a/b", rest, ("a/b",), True, "/files/{path...}"),
    ],
)
def test_request_finds_its_handler(
    router: Router,
    make_channel: Any,
    method: str,
    path: str,
    handler: Any,
    params: tuple[str, ...],
    public: bool,
    pattern: str,
) -> None:
    http_request = make_channel().make_request(method, path)
    found = router.find(http_request)
    assert (found, http_request.path_params, http_request.route_path) == (
        Route(handler, public, path=pattern),
        params,
        pattern,
    )


@pytest.mark.parametrize(
    ("method", "raw_path", "handler", "params"),
    [
        ("GET", b"/things/a%2Fb", one, ("a/b",)),
        ("GET", b"/things/a%2fparts", one, ("a/parts",)),
        ("DELETE", b"/things/7/parts/a%2Fb%2F%252F", part, ("7", "a/b/%2F")),
        ("GET", b"/files/a%2Fb/c", rest, ("a/b/c",)),
        ("GET", b"/things/%C3%A4", one, ("ä",)),
    ],
)
def test_encoded_slash_is_part_of_its_segment(
    router: Router, make_channel: Any, method: str, raw_path: bytes, handler: Any, params: tuple[str, ...]
) -> None:
    http_request = make_channel().make_request(method, unquote(raw_path.decode()), raw_path=raw_path)
    assert (router.find(http_request).handler, http_request.path_params) == (handler, params)


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({}, False),
        ({"operation": Operation(id="a", summary="A.")}, False),
        ({"operation": Operation(id="a", summary="A."), "reads_query": True}, True),
        ({"operation": Operation(id="a", summary="A.", query_type=PageQuery)}, True),
    ],
)
def test_route_with_query_type_reads_the_query(make_channel: Any, options: dict[str, Any], reads: bool) -> None:
    router = Router()
    router.add("GET", "/things", plain, **options)
    assert router.find(make_channel().make_request("GET", "/things")).reads_query == reads


@pytest.mark.parametrize(
    "path", ["/", "/thing", "/things/", "/things//parts", "/things/7/8", "/things/7/parts/8/9", "/files/", "//things"]
)
def test_unknown_path_is_not_found(router: Router, make_channel: Any, path: str) -> None:
    with pytest.raises(NotFound, match=f"Unknown path: {path}"):
        router.find(make_channel().make_request("GET", path))


def test_wrong_method_error_lists_the_allowed_methods(router: Router, make_channel: Any) -> None:
    http_request = make_channel().make_request("PUT", "/things/7")
    with pytest.raises(MethodNotAllowed):
        router.find(http_request)
    assert http_request.extra_headers == [(b"allow", b"GET, HEAD, OPTIONS, DELETE")]


async def test_options_lists_the_methods(router: Router, make_channel: Any) -> None:
    line = make_channel()
    http_request = line.make_request("OPTIONS", "/things")
    await router.find(http_request).handler(http_request)
    start = line.sent[0]
    assert (start["status"], dict(start["headers"])[b"allow"]) == (204, b"POST, OPTIONS")
