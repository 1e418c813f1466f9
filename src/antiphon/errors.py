"""The errors that Antiphon raises, in one class tree.

    AntiphonError
    ├── InvalidRequest             400  invalid_request_error
    │   ├── MissingParameter       400  code missing_required_parameter
    │   ├── UnsupportedParameter   400  code unsupported_parameter
    │   ├── UnsupportedTool        400  code unsupported_tool
    │   ├── PreviousResponseNotFound 400  code previous_response_not_found
    │   ├── ContextLengthExceeded  400  code context_length_exceeded
    │   ├── InvalidApiKey          401  code invalid_api_key
    │   ├── OriginNotAllowed       403  code origin_not_allowed
    │   ├── HostNotAllowed         403  code host_not_allowed
    │   ├── InsufficientScope      403  code insufficient_scope
    │   ├── NotFound               404  code not_found
    │   │   └── ModelNotFound      404  code model_not_found
    │   ├── MethodNotAllowed       405  code method_not_allowed
    │   ├── BodyTooLarge           413  code request_too_large
    │   └── UpgradeRequired        426  code upgrade_required
    ├── ConnectorError             424  external_connector_error: an MCP server cannot list its tools
    ├── RateLimited                429  rate_limit_error: too many requests, here or upstream
    │   └── QuotaExceeded          429  insufficient_quota: a budget or quota is used up
    ├── ServerError                500  server_error
    │   ├── ModelError             500  model_error: the model stopped or gave invalid output
    │   ├── UpstreamError          502  the upstream failed or is unreachable
    │   │   └── UpstreamTimeout    504  the upstream did not answer in time
    │   └── Unavailable            503  the server is stopping or full
    │       └── StoreUnavailable   503  code store_unavailable: the store cannot be written to
    │           ├── StoreFull      503  code store_full
    │           └── StoreLost      503  code store_lost: its files were deleted or replaced
    └── ConfigError                a setting is invalid; the process does not start

Each class defines the HTTP status, the error type and the default code, so no other module maps them. `retry_after` is
in seconds and is set on errors that a later retry may avoid. Errors of the store have a default for it.
"""

from typing import ClassVar


class AntiphonError(Exception):
    """Base of all errors. `message` is shown to the client or, for a ConfigError, to the operator."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    default_retry_after: ClassVar[float | None] = None
    max_length: ClassVar[int] = 2500

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        message = self._shorten(message)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else self._shorten(param)
        self.code = code if code is not None else self.default_code
        self.retry_after = retry_after if retry_after is not None else self.default_retry_after

    def _shorten(self, text: str) -> str:
        """Cut out the middle of a text that repeats a long value of a client. The end may state the remedy."""
        return text if len(text) <= self.max_length else f"{text[: self.max_length // 2]}…{text[-500:]}"


class InvalidRequest(AntiphonError):
    status = 400
    type = "invalid_request_error"


class MissingParameter(InvalidRequest):
    default_code = "missing_required_parameter"


class UnsupportedParameter(InvalidRequest):
    default_code = "unsupported_parameter"


class UnsupportedTool(InvalidRequest):
    default_code = "unsupported_tool"


class PreviousResponseNotFound(InvalidRequest):
    default_code = "previous_response_not_found"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class InvalidApiKey(InvalidRequest):
    status = 401
    default_code = "invalid_api_key"


class OriginNotAllowed(InvalidRequest):
    status = 403
    default_code = "origin_not_allowed"


class HostNotAllowed(InvalidRequest):
    status = 403
    default_code = "host_not_allowed"


class InsufficientScope(InvalidRequest):
    """The API key is valid, but does not have the scope that the route needs."""

    status = 403
    default_code = "insufficient_scope"


class NotFound(InvalidRequest):
    status = 404
    default_code = "not_found"


class ModelNotFound(NotFound):
    default_code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    default_code = "method_not_allowed"


class BodyTooLarge(InvalidRequest):
    status = 413
    default_code = "request_too_large"


class UpgradeRequired(InvalidRequest):
    status = 426
    default_code = "upgrade_required"


class ConnectorError(AntiphonError):
    status = 424
    type = "external_connector_error"
    default_code = "http_error"


class RateLimited(AntiphonError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class QuotaExceeded(RateLimited):
    """A budget, a number of bytes or objects, or the quota at an upstream is used up."""

    type = "insufficient_quota"
    default_code = "insufficient_quota"


class ServerError(AntiphonError):
    default_code = "server_error"


class ModelError(ServerError):
    type = "model_error"
    default_code = "model_error"


class UpstreamError(ServerError):
    status = 502
    default_code = "upstream_error"


class UpstreamTimeout(UpstreamError):
    status = 504
    default_code = "upstream_timeout"


class Unavailable(ServerError):
    status = 503
    default_code = "server_unavailable"


class StoreUnavailable(Unavailable):
    """The store cannot be written to now. It has logged the cause, so the error is not logged with a traceback."""

    default_code = "store_unavailable"
    default_retry_after = 1.0


class StoreFull(StoreUnavailable):
    default_code = "store_full"


class StoreLost(StoreUnavailable):
    default_code = "store_lost"


class ConfigError(AntiphonError):
    default_code = "config_error"
    max_length = 100_000  # the operator gets all problems of the settings
