"""Parse msgspec's validation errors into param paths, and remove unknown fields from a body."""

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct, ValidationError, structs

from antiphon.errors import InvalidRequest, MissingParameter
from antiphon.protocol.choices import find_choices

Steps = list[str | int]

# msgspec's text before a path: for a value, and for a key of a mapping.
_PATH_MARKERS = (" - at ", " - at `key` in ")
_PATH = re.compile(r"(?:\.\w+|\[(?:\d+|\.\.\.)\])*")
_STEP = re.compile(r"\.?(\w+)|\[(\d+)\]")
_UNKNOWN_FIELD = "Object contains unknown field `"
_INVALID_CHOICES = ("Invalid enum value ", "Invalid value ")
_MISSING_FIELD = "Object missing required field `"
# A message contains the invalid value, which may be as long as the body and may look like many paths.
_MAX_LENGTH = 200
_MAX_DEPTH = 100
# An object with an unknown field has at most this many fields: more than any object of the API has.
_MAX_FIELDS = 128


class FieldError(Struct, frozen=True):
    """A validation error: the path of the field, such as `input[0].role`, the reason, and the allowed values."""

    path: str
    reason: str
    choices: tuple[str, ...] = ()

    @property
    def unknown_field(self) -> str | None:
        return self.reason[len(_UNKNOWN_FIELD) : -1] if self.reason.startswith(_UNKNOWN_FIELD) else None

    def to_invalid_request(self) -> InvalidRequest:
        """Return the error for the client."""
        path = self.path.replace("[...]", "")  # msgspec does not name the key of a mapping
        if self.unknown_field is not None:
            param = _shorten(_join(path, self.unknown_field))
            return InvalidRequest(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
        if self.reason.startswith(_MISSING_FIELD):
            param = _join(path, self.reason[len(_MISSING_FIELD) : -1])
            return MissingParameter(f"Missing required parameter: '{param}'.", param=param)
        reason = _shorten(self.reason)
        code = "invalid_type" if reason.startswith("Expected") and ", got" in reason else "invalid_value"
        where = f"Invalid value for '{path}'" if path else "Invalid request body"
        return InvalidRequest(f"{where}: {reason}.{self._describe_choices()}", param=path or None, code=code)

    def _describe_choices(self) -> str:
        choices = ", ".join(f"'{choice}'" for choice in self.choices)
        return f" Supported values are: {choices}." if choices else ""


def parse_error(error: ValidationError) -> FieldError:
    """Split a msgspec error into path and reason. Each level appends its part of the path; the outermost is last.

    The path is read from the end of the message. Text before it may be a value that only looks like a path.
    """
    message = str(error)
    path, end = "", len(message)
    for _ in range(_MAX_DEPTH):
        start = message.rfind("`$", 0, end)
        marker = next((marker for marker in _PATH_MARKERS if message.endswith(marker, 0, max(start, 0))), None)
        if marker is None or not _PATH.fullmatch(message, start + 2, end - 1) or not message.endswith("`", 0, end):
            break
        path += message[start + 2 : end - 1]
        end = start - len(marker)
    return FieldError(path.removeprefix("."), message[:end])


def explain_error(error: ValidationError, kind: Any, body: bytes) -> FieldError:
    """Parse the error of decoding a body as `kind`, and find the allowed values if the error is about one of them."""
    fault = parse_error(error)
    if not fault.reason.startswith(_INVALID_CHOICES) or "[...]" in fault.path:
        return fault
    return structs.replace(fault, choices=find_choices(kind, body, _split_path(fault.path)))


class TooManyFields(Exception):
    """An object has so many fields that the unknown ones cannot be removed one by one."""


def remove_field(body: bytes, path: str, field: str) -> tuple[bytes, list[str]]:
    """Remove the unknown `field` at `path` and from similar objects. Return the JSON and the removed paths.

    A client that adds a field to one message usually adds it to all, so all are removed in one pass. Objects are
    similar if they have the same path in other elements of the same arrays and the objects along the path have the same
    types: then they decode to the same structs. All other JSON is unchanged, byte for byte. Raises TooManyFields.
    """
    steps = _split_path(path)
    found: list[str] = []
    try:
        body = _Removal(_find_types(body, steps), field, found).apply(body, steps, "")
    except (LookupError, ValidationError):
        found = []
    if not found:  # the field name itself looks like a path, so the field cannot be located
        raise InvalidRequest(f"Unknown parameter: '{_shorten(field)}'.", code="unknown_parameter")
    return body, found


class _Removal:
    def __init__(self, types: list[bytes | None], field: str, found: list[str]) -> None:
        self._types = types
        self._field = field
        self._found = found
        self._encoded_field = msgspec.json.encode(field)

    def apply(self, raw: bytes, steps: Steps, at: str, depth: int = 0) -> bytes:
        """Return `raw` without the field. `at` is the path of `raw`, and `depth` the number of objects around it."""
        if self._encoded_field not in raw and b"\\" not in raw:  # neither literally nor with escapes
            return raw
        if steps and isinstance(steps[0], int):
            return self._apply_to_elements(raw, steps[1:], at, depth) if raw.startswith(b"[") else raw
        fields = _decode_fields(raw) if raw.startswith(b"{") else {}
        if not fields or _get_type(fields) != self._types[depth]:
            return raw
        if not steps and self._field in fields:
            del fields[self._field]
            self._found.append(_join(at, self._field))
        elif steps and (name := str(steps[0])) in fields:
            fields[name] = Raw(self.apply(bytes(fields[name]), steps[1:], _join(at, name), depth + 1))
        return msgspec.json.encode(fields)

    def _apply_to_elements(self, raw: bytes, steps: Steps, at: str, depth: int) -> bytes:
        elements = enumerate(_decode_elements(raw))
        return msgspec.json.encode(
            [Raw(self.apply(bytes(element), steps, f"{at}[{index}]", depth)) for index, element in elements]
        )


def _split_path(path: str) -> Steps:
    return [int(index) if index else name for name, index in _STEP.findall(path)]


def _find_types(raw: bytes | Raw, steps: Steps) -> list[bytes | None]:
    """Return the `type` values of the objects along the path."""
    if steps and isinstance(steps[0], int):
        return _find_types(_decode_elements(raw)[steps[0]], steps[1:])
    fields = _decode_fields(raw)
    if not steps and len(fields) > _MAX_FIELDS:
        raise TooManyFields
    return [_get_type(fields), *(_find_types(fields[str(steps[0])], steps[1:]) if steps else ())]


def _get_type(fields: dict[str, Raw]) -> bytes | None:
    return bytes(fields["type"]) if "type" in fields else None


def _decode_fields(raw: bytes | Raw) -> dict[str, Raw]:
    return msgspec.json.decode(raw, type=dict[str, Raw])


def _decode_elements(raw: bytes | Raw) -> list[Raw]:
    return msgspec.json.decode(raw, type=list[Raw])


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"
