"""What is wrong with a body: msgspec's errors, read back into paths, and the unknown fields they name, taken out."""

import re

import msgspec
from msgspec import Raw, Struct, ValidationError

from antiphon.errors import InvalidRequest, MissingParameter

Steps = list[str | int]

# What msgspec writes before a path: about a value, and about a key of a mapping.
_MARKS = (" - at ", " - at `key` in ")
_PATH = re.compile(r"(?:\.\w+|\[(?:\d+|\.\.\.)\])*")
_STEP = re.compile(r"\.?(\w+)|\[(\d+)\]")
_UNKNOWN_FIELD = "Object contains unknown field `"
_MISSING_FIELD = "Object missing required field `"
# An error repeats the value it is about, which may be as long as the body, and may look like many paths.
_LONGEST = 200
_DEEPEST = 100


class FieldError(Struct, frozen=True):
    """A msgspec error in its two parts: `input[0].role` is the path, what is wrong there the reason."""

    path: str
    reason: str

    @property
    def unknown_field(self) -> str | None:
        return self.reason[len(_UNKNOWN_FIELD) : -1] if self.reason.startswith(_UNKNOWN_FIELD) else None

    def to_invalid_request(self) -> InvalidRequest:
        """The error to answer with."""
        path = self.path.replace("[...]", "")  # msgspec does not name the key of a mapping
        if self.unknown_field is not None:
            param = _shorten(_join(path, self.unknown_field))
            return InvalidRequest(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
        if self.reason.startswith(_MISSING_FIELD):
            param = _join(path, self.reason[len(_MISSING_FIELD) : -1])
            return MissingParameter(f"Missing required parameter: '{param}'.", param=param)
        reason = _shorten(self.reason)
        code = "invalid_type" if reason.startswith("Expected") and ", got" in reason else "invalid_value"
        if not path:
            return InvalidRequest(f"The body is wrong: {reason}.", code=code)
        return InvalidRequest(f"Invalid value for '{path}': {reason}.", param=path, code=code)


def parse_error(error: ValidationError) -> FieldError:
    """Take an error apart. Every level adds its own part of the path at the end: the outermost comes last.

    Only the end is looked at: before it, the message may repeat a value that somebody made to look like a path.
    """
    message = str(error)
    path, end = "", len(message)
    for _ in range(_DEEPEST):
        start = message.rfind("`$", 0, end)
        mark = next((mark for mark in _MARKS if message.endswith(mark, 0, max(start, 0))), None)
        if mark is None or not _PATH.fullmatch(message, start + 2, end - 1) or not message.endswith("`", 0, end):
            break
        path += message[start + 2 : end - 1]
        end = start - len(mark)
    return FieldError(path.removeprefix("."), message[:end])


def remove_field(body: bytes, path: str, field: str) -> tuple[bytes, list[str]]:
    """The JSON without the unknown `field` at `path` and in its likes, and where they were.

    A client that adds a field to one message adds it to all, so they go in one pass. Alike are the objects in the same
    place of other elements of the same arrays, if the types on the way there are the same too: they are the same
    structs. Everything beside the way stays as it was, byte for byte.
    """
    steps: Steps = [int(index) if index else name for name, index in _STEP.findall(path)]
    found: list[str] = []
    try:
        body = _Removal(_find_kinds(body, steps), field, found).apply(body, steps, "")
    except (LookupError, ValidationError):
        found = []
    if not found:  # the name was made up to look like a path: where it ends and where the field is, nobody can tell
        raise InvalidRequest(f"Unknown parameter: '{_shorten(field)}'.", code="unknown_parameter")
    return body, found


class _Removal:
    def __init__(self, kinds: list[bytes | None], field: str, found: list[str]) -> None:
        self._kinds = kinds
        self._field = field
        self._found = found
        self._name = msgspec.json.encode(field)

    def apply(self, raw: bytes, steps: Steps, at: str, depth: int = 0) -> bytes:
        """`raw` without the field. `at` is the path of `raw`, `depth` the number of objects around it."""
        if self._name not in raw and b"\\" not in raw:  # neither as it is nor with escapes
            return raw
        if steps and isinstance(steps[0], int):
            return self._apply_to_elements(raw, steps[1:], at, depth) if raw.startswith(b"[") else raw
        fields = _decode_fields(raw) if raw.startswith(b"{") else {}
        if not fields or _kind(fields) != self._kinds[depth]:
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


def _find_kinds(raw: bytes | Raw, steps: Steps) -> list[bytes | None]:
    """The types of the objects on the way."""
    if steps and isinstance(steps[0], int):
        return _find_kinds(_decode_elements(raw)[steps[0]], steps[1:])
    fields = _decode_fields(raw)
    return [_kind(fields), *(_find_kinds(fields[str(steps[0])], steps[1:]) if steps else ())]


def _kind(fields: dict[str, Raw]) -> bytes | None:
    return bytes(fields["type"]) if "type" in fields else None


def _decode_fields(raw: bytes | Raw) -> dict[str, Raw]:
    return msgspec.json.decode(raw, type=dict[str, Raw])


def _decode_elements(raw: bytes | Raw) -> list[Raw]:
    return msgspec.json.decode(raw, type=list[Raw])


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
