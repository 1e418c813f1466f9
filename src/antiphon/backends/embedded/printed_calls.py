"""Recognize calls that a model prints as text, in forms other than the one that the grammar defines.

Models print calls as JSON, in a code block or in tags, or as a Python expression:

    ```json
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    ```
    get_weather(city="Paris")

Only the start is read, up to the tool's name. The arguments that follow may be invalid, so the backend generates them
again, under the tool's schema.
"""

import json
import re
from collections.abc import Collection

from antiphon.backends.base import Turn
from antiphon.protocol.content import InputText
from antiphon.protocol.items import Message

# Marks before a call: a code block with its language, a tag, the bracket of a list.
_MARKS = re.compile(r"\s*(?:```[a-z_]{0,12}[ \t]*\n|<(?:tool_call|function_call|tools?)>|\[)", re.IGNORECASE)
_PARTIAL_MARK = re.compile(
    r"(?:`{0,2}|```[a-z_]{0,12}[ \t]*|<|<(?:t|to|too|tool|tools|tool_c?a?l?l?|f[a-z_]{0,12}))", re.IGNORECASE
)
_MAX_MARKS = 4
_JSON_STARTS = ("{", '{"type":"function",', '{"type":"function","function":{', '{"function":{')
_NAME_KEYS = ("name", "tool", "tool_name", "function")
_SPACE = re.compile(r"\s+")
# A client that requests one of these wants it as text, even if it looks like a call.
_CODE_WORDS = re.compile(r"\b(?:json|python|code|snippet|example)", re.IGNORECASE)


class CallForms:
    """The starts of calls of certain tools."""

    def __init__(self, tools: Collection[str]) -> None:
        self._starts = {
            f'{start}"{key}":{_compact(json.dumps(name, ensure_ascii=False))}': name
            for start in _JSON_STARTS
            for key in _NAME_KEYS
            for name in tools
        }
        self._starts |= {f"{name}(": name for name in tools if name.isidentifier()}

    def find_tool(self, text: str) -> str | None:
        """Return the name of the tool whose call the text starts; None if there is none, or not yet."""
        compact = _compact(_skip_marks(text))
        return next((name for start, name in self._starts.items() if compact.startswith(start)), None)

    def may_be_call(self, text: str) -> bool:
        """Return True if more text can make this the start of a call."""
        rest = _skip_marks(text)
        if _PARTIAL_MARK.fullmatch(rest):
            return True
        compact = _compact(rest)
        return any(start.startswith(compact) for start in self._starts)


def _skip_marks(text: str) -> str:
    for _ in range(_MAX_MARKS):
        mark = _MARKS.match(text)
        if mark is None:
            break
        text = text[mark.end() :]
    return text.lstrip()


def _compact(text: str) -> str:
    return _SPACE.sub("", text)


def requests_code(turn: Turn) -> bool:
    """Return True if the instructions or a message mention code or JSON, so that it may be the answer."""
    texts = [turn.request.instructions or ""]
    for item in turn.items:
        if isinstance(item, Message) and item.role != "assistant":
            if isinstance(item.content, str):
                texts.append(item.content)
            else:
                texts += [part.text for part in item.content if isinstance(part, InputText)]
    return any(_CODE_WORDS.search(text) for text in texts)
