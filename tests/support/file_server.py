"""An HTTP server for files that can cut connections and damage content."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serves `files` by path. `requests` has the path, Range and Authorization of each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.supports_ranges = True
        self.cut_after: list[int] = []
        """For each of the next replies, the number of bytes after which the connection is cut."""
        self.damaged = 0
        """Number of next replies with a wrong byte."""


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        self.server.requests.append((self.path, requested, self.headers.get("Authorization")))
        if self.path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = (
            int(requested.removeprefix("bytes=").removesuffix("-")) if requested and self.server.supports_ranges else 0
        )
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_body(body, start)

    def send_body(self, body: bytes, start: int) -> None:
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        if self.server.damaged:
            self.server.damaged -= 1
            rest = bytes([rest[0] ^ 1]) + rest[1:]
        if self.server.cut_after:
            rest = rest[: self.server.cut_after.pop(0)]
        self.wfile.write(rest)

    def log_message(self, format: str, *args: object) -> None:
        pass
