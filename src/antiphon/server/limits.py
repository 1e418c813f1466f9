"""Reading a request's body, within bounds."""

from antiphon.errors import BodyTooLarge, InvalidRequest
from antiphon.server.exchange import ClientGone, Exchange

_NOT_JSON = (b"application/x-www-form-urlencoded", b"multipart/")


async def read_body(exchange: Exchange, limit: int) -> bytes:
    """The whole body. Refuses one that is too large before reading it, if it says so itself, or as soon as it is."""
    _check_coding(exchange)
    if _declared_length(exchange) > limit:
        raise _too_large(limit)
    body, more = await _receive(exchange)
    if len(body) > limit:
        raise _too_large(limit)
    if not more:
        return body
    whole = bytearray(body)
    while more:
        body, more = await _receive(exchange)
        if len(whole) + len(body) > limit:
            raise _too_large(limit)
        whole += body
    return bytes(whole)


async def _receive(exchange: Exchange) -> tuple[bytes, bool]:
    message = await exchange.receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


def _declared_length(exchange: Exchange) -> int:
    declared = exchange.headers.get(b"content-length", b"0")
    if not declared.isdigit():
        raise InvalidRequest("The header Content-Length must be a number.", code="invalid_header")
    return int(declared)


def _check_coding(exchange: Exchange) -> None:
    """Many clients send JSON under no type or a wrong one, so only what is surely something else is refused."""
    kind = exchange.headers.get(b"content-type", b"").lower()
    if kind.startswith(_NOT_JSON):
        raise InvalidRequest(
            "The body must be JSON: send 'Content-Type: application/json'.", code="invalid_content_type"
        )
    coding = exchange.headers.get(b"content-encoding", b"identity").lower()
    if coding != b"identity":
        raise InvalidRequest(
            "The body must not be compressed: send no Content-Encoding.", code="invalid_content_encoding"
        )


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is too large: this server takes at most {limit} bytes.")
