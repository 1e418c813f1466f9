"""The text in which a model reads what its tools came to, byte for byte as the clients of this format expect it."""

from typing import Any

import msgspec

from antiphon.protocol.json_text import read_json

_MISSING = "(missing)"
_FLAGS = ("IsServerTool", "WasExecuted")
_BODIES = ("ArgumentsJson", "ResultJson", "ErrorMessage")


def build_tool_results(tool_results_json: str | None) -> str | None:
    """The `[TOOL_RESULTS]` block of a JSON array of results; None where there is nothing to tell."""
    try:
        results = read_json(tool_results_json or "null")
    except msgspec.DecodeError:
        return None
    entries = [_describe(result) for result in results if isinstance(result, dict)] if isinstance(results, list) else []
    if not entries:
        return None
    return "\n".join(["[TOOL_RESULTS]", "", *("\n".join(entry) + "\n" for entry in entries)]).rstrip()


def _describe(result: dict[str, Any]) -> list[str]:
    lines = [f"- CallId: {_name(result, 'CallId')}", f"  Name: {_name(result, 'Name')}"]
    for flag in _FLAGS:
        value = _find(result, flag)
        if isinstance(value, bool):
            lines.append(f"  {flag}: {'true' if value else 'false'}")
    for field in _BODIES:
        text = _text(_find(result, field))
        if text.strip():
            lines += [f"  {field}:", f"    {text}"]
    return lines


def _name(result: dict[str, Any], field: str) -> str:
    return _text(_find(result, field)) or _MISSING


def _find(result: dict[str, Any], field: str) -> Any:
    """The field in PascalCase or in camelCase."""
    value = result.get(field)
    return value if value is not None else result.get(field[0].lower() + field[1:])


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
