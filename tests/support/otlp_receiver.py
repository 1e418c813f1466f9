"""A receiver of traces and metrics over OTLP/HTTP on the loopback interface. It decodes the protobuf of each export.

with OtlpReceiver() as receiver:
    exporter = OTLPSpanExporter(endpoint=receiver.url)
    ...
    assert receiver.spans["chat scripted"].parent == "invoke_agent agent"
"""

import gzip
import threading
import zlib
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class ReceivedSpan:
    """A span as it was exported. Ids are in hex."""

    def __init__(self, span: Any, resource: dict[str, Any]) -> None:
        self.name: str = span.name
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.attributes = _read_attributes(span.attributes)
        self.status = "error" if span.status.code == span.status.STATUS_CODE_ERROR else ""
        self.links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        self.resource = resource


class ReceivedPoint:
    """The values of a histogram with the same attributes, as they were exported."""

    def __init__(self, name: str, unit: str, histogram: Any, point: Any) -> None:
        self.name = name
        self.unit = unit
        self.is_delta = histogram.aggregation_temporality == 1
        self.attributes = _read_attributes(point.attributes)
        self.count: int = point.count
        self.sum: float = point.sum
        self.counts = list(point.bucket_counts)
        self.bounds = list(point.explicit_bounds)
        self.times = (point.start_time_unix_nano, point.time_unix_nano)


class Reply(NamedTuple):
    """An answer of the receiver to one export."""

    status: int
    headers: Mapping[str, str] = MappingProxyType({})


class OtlpReceiver:
    """Receives exports. `replies` are the answers to the first ones; all others are accepted.

    `requests` has the path, the headers and the decompressed body of each request. `disconnected` is set when a
    connection has ended.
    """

    def __init__(self, replies: Sequence[Reply] = ()) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.disconnected = threading.Event()
        self._replies = list(replies)
        self.spans: list[ReceivedSpan] = []
        self.points: list[ReceivedPoint] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                encoding = self.headers.get("Content-Encoding")
                if encoding is not None:
                    body = gzip.decompress(body) if encoding == "gzip" else zlib.decompress(body)
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.requests.append((self.path, headers, body))
                answer = receiver.next_reply()
                if answer.status == 200 and headers["content-type"] == "application/x-protobuf":
                    receiver.receive(self.path, body)
                reply = ExportTraceServiceResponse().SerializeToString()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def finish(self) -> None:
                super().finish()
                receiver.disconnected.set()

            def log_message(self, *_: object) -> None:
                """Write no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "OtlpReceiver":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def next_reply(self) -> Reply:
        return self._replies.pop(0) if self._replies else Reply(200)

    def receive(self, path: str, body: bytes) -> None:
        if path == "/v1/metrics":
            self._receive_metrics(body)
            return
        assert path.endswith("/v1/traces")
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _read_attributes(group.resource.attributes)
            self.spans += [ReceivedSpan(span, resource) for scope in group.scope_spans for span in scope.spans]

    def _receive_metrics(self, body: bytes) -> None:
        for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (each for scope in group.scope_metrics for each in scope.metrics):
                points = metric.histogram.data_points
                self.points += [ReceivedPoint(metric.name, metric.unit, metric.histogram, each) for each in points]

    def list_parents(self) -> list[tuple[str, str]]:
        """Return the name of each span with that of its parent, in order."""
        names = {span.span_id: span.name for span in self.spans}
        return sorted((span.name, names.get(span.parent_id, span.parent_id)) for span in self.spans)

    def find(self, name: str) -> ReceivedSpan:
        """Return the only span of this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found


def _read_attributes(attributes: Any) -> dict[str, Any]:
    return {each.key: _read_value(each.value) for each in attributes}


def _read_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_read_value(each) for each in value.array_value.values]
    return getattr(value, kind)
