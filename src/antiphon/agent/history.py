"""Histories of agents, as lists of JSON items: completing them, turning output into input, encrypted reasoning.

Servers reject a history in which a call has no output. `complete_history` makes a history from any source acceptable
and loses no content. The repair of stored conversations in `engine/prepare/history_repair.py` is another operation on
decoded items: it drops items, leaves the last calls open for the client, and returns a warning for each change.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from msgspec import Struct

from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.protocol.items import LOST_OUTPUT
from antiphon.protocol.json_text import JsonObject, to_text
from antiphon.tools.base import ToolInvocation
from antiphon.tools.native import CALL_NAMES, encode_arguments, make_native_output

OUTPUT_TYPES = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""The calls of functions, each with the type of its output. They have a name and a call id."""

# All calls whose output comes from a client, unless the server runs them itself.
_ALL_OUTPUT_TYPES = {
    **OUTPUT_TYPES,
    "computer_call": "computer_call_output",
    "shell_call": "shell_call_output",
    "local_shell_call": "local_shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "tool_search_call": "tool_search_output",
}
_OUTPUTS = frozenset(_ALL_OUTPUT_TYPES.values())
# No other item refers to the ids of these, and a server that has not stored the items would not find them.
_REMOVABLE_IDS = frozenset({"message", "reasoning", *OUTPUT_TYPES, *OUTPUT_TYPES.values()})

MAX_OUTPUT = 400_000
"""The number of characters of a tool's output that the model reads. The ledger has the whole output."""

STRAY = "The result of a call that is not in this conversation:"
UNANSWERED = "The model has made this call:"

ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""The value of `include` that requests reasoning which a later request can send back."""

REASONING_LOST = "The server can no longer decrypt the reasoning of earlier turns. The run goes on without it."

_DECRYPTION_ERROR = "invalid_encrypted_content"
_SCHEMA_ERROR = "invalid_json_schema"
_FORMAT_NAMES = ("text.format", "response_format", "json_schema", "structured output")
_FORMAT_PARAMS = ("text", "text.format", "text.format.type", "response_format", "response_format.type")
_UNSUPPORTED_WORDS = ("not supported", "unsupported", "not support", "cannot", "not available", "not allowed")
_UNSUPPORTED_MESSAGE = "encrypted content is not supported"


# Completing a history


def complete_history(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Return a history that servers accept, with all of its content.

    A function call without an output gets an output that states this. Other calls without an output become messages,
    because no true output can be given for them. Outputs without a call become messages too. Only reasoning that led
    to nothing is dropped.
    """
    return drop_lone_reasoning([each for completed in _complete_each(items) for each in completed])


def complete_joined(earlier: Sequence[JsonObject], items: Sequence[JsonObject]) -> tuple[list[JsonObject], int]:
    """Complete the history of two parts. Also return the number of items in the result that are from the first."""
    completed = _complete_each([*earlier, *items])
    later = [each for part in completed[len(earlier) :] for each in part]
    joined = drop_lone_reasoning([each for part in completed for each in part])
    return joined, len(joined) - len(drop_lone_reasoning(later))


def _complete_each(items: Sequence[JsonObject]) -> list[list[JsonObject]]:
    """Return the items that replace each item."""
    paired = _find_pairs(items)
    completed: list[list[JsonObject]] = []
    for index, item in enumerate(items):
        if index in paired or _find_key(item) is None:
            completed.append([to_input_item(item)])
        elif item["type"] in OUTPUT_TYPES:
            lost = {"type": OUTPUT_TYPES[item["type"]], "call_id": item.get("call_id"), "output": LOST_OUTPUT}
            completed.append([to_input_item(item), lost])
        else:
            completed.append([{"role": "user", "content": _describe_unpaired(item)}])
    return completed


class HistoryCompleter:
    """Completes the history of a run before each request, without processing the items of earlier requests again.

    The history is one list that only grows between two requests. Another list starts again.
    """

    def __init__(self) -> None:
        self._history: Sequence[JsonObject] = ()
        self._count = 0
        """The number of items whose completed form cannot change any more."""
        self._completed: list[JsonObject] = []

    def complete(self, history: Sequence[JsonObject]) -> list[JsonObject]:
        """Return the history from its last compaction on, completed, without empty reasoning."""
        new = history[self._count :]
        if history is not self._history or any(item.get("type") == "compaction" for item in new):
            self._history, self._count, self._completed = history, 0, []
            new = drop_compacted(history)
        added = [item for item in complete_history(new) if not is_empty_reasoning(item)]
        if _is_closed(new):
            self._count = len(history)
            self._completed += added
            return list(self._completed)
        return [*self._completed, *added]


def _is_closed(items: Sequence[JsonObject]) -> bool:
    """Return True if later items cannot change the completed form of these."""
    is_paired = len(_find_pairs(items)) == sum(_find_key(item) is not None for item in items)
    return is_paired and (not items or items[-1].get("type") != "reasoning")


def drop_lone_reasoning(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Drop the reasoning that no text or call of the model follows."""
    result: list[JsonObject] = []
    is_followed = False
    for item in reversed(items):
        kind = item.get("type", "message")
        if kind != "reasoning":
            is_input = kind in _OUTPUTS or (kind == "message" and item.get("role", "assistant") != "assistant")
            is_followed = not is_input
        elif not is_followed:
            continue
        result.append(item)
    return result[::-1]


def drop_compacted(items: Sequence[JsonObject]) -> Sequence[JsonObject]:
    """Drop the items before the last compaction, except system and developer messages."""
    last = max((index for index, item in enumerate(items) if item.get("type") == "compaction"), default=None)
    if last is None:
        return items
    rules = [item for item in items[:last] if item.get("role") in ("system", "developer")]
    return [*rules, *items[last:]]


def to_input_item(item: JsonObject) -> JsonObject:
    """Return an output item as an input item: without its id and without nulls, where servers need neither.

    Encrypted reasoning keeps its id, because some servers can decrypt it only together with the id. A call has its
    arguments or its input as text, even if a server has sent an object or nothing: servers reject other calls.
    """
    if item.get("type") not in _REMOVABLE_IDS and "role" not in item:
        return item
    omitted = ("status",) if is_encrypted(item) else ("id", "status")
    converted = {name: value for name, value in item.items() if name not in omitted and value is not None}
    if item.get("type") == "function_call":
        converted["arguments"] = to_text(item.get("arguments") or {})
    elif item.get("type") == "custom_tool_call":
        converted["input"] = to_text(converted.get("input", ""))
    return converted


def is_empty_reasoning(item: JsonObject) -> bool:
    """Return True if only a server that has stored this reasoning can know its content."""
    return item.get("type") == "reasoning" and not item.get("encrypted_content") and not item.get("content")


def _find_pairs(items: Sequence[JsonObject]) -> set[int]:
    """Return the indexes of calls with an output, and of their outputs."""
    paired: set[int] = set()
    open_calls: dict[Hashable, int] = {}
    for index, item in enumerate(items):
        key = _find_key(item)
        if key is None:
            continue
        if item["type"] in _ALL_OUTPUT_TYPES:
            open_calls[key] = index
        elif key in open_calls:
            paired |= {index, open_calls.pop(key)}
    return paired


def _find_key(item: JsonObject) -> Hashable | None:
    """Return the key that a call and its output share; None for other items."""
    kind = item.get("type")
    output_type = _ALL_OUTPUT_TYPES.get(kind, kind if kind in _OUTPUTS else None) if isinstance(kind, str) else None
    if output_type is None:
        return None
    call_id = get_call_id(item)
    # A tool search that the server has run has no call id.
    return None if call_id is None and output_type == "tool_search_output" else (output_type, str(call_id))


def _describe_unpaired(item: JsonObject) -> str | list[JsonObject]:
    """Return the content of a message that replaces an unpaired call or output. Images stay images."""
    if item["type"] in _ALL_OUTPUT_TYPES:
        content = {name: value for name, value in item.items() if name not in ("id", "status", "call_id")}
        return f"{UNANSWERED} {to_text(content)}\n{LOST_OUTPUT}"
    output = item.get("output", item.get("tools"))
    parts = _find_parts(output)
    if parts:
        return [{"type": "input_text", "text": STRAY}, *parts]
    return f"{STRAY} {to_text(item.get('status') if output is None else output)}"


def _find_parts(output: Any) -> list[JsonObject]:
    """Return an output as content parts of a user message, if it consists of such parts."""
    if isinstance(output, dict) and output.get("type") == "computer_screenshot":
        fields = {name: output[name] for name in ("image_url", "file_id", "detail") if output.get(name)}
        return [{"type": "input_image", **fields}]
    parts = output if isinstance(output, list) else []
    fits = all(isinstance(part, dict) and str(part.get("type")).startswith("input_") for part in parts)
    return parts if fits else []


# Calls and texts


def is_call(item: JsonObject) -> bool:
    """Return True for a call whose output comes from a client."""
    return item.get("type") in _ALL_OUTPUT_TYPES


def has_unsupported_call(items: Sequence[JsonObject], native_calls: Collection[str] = ()) -> bool:
    """Return True if there is a call that neither the server nor an agent runs."""
    paired = _find_pairs(items)
    unpaired = (item for index, item in enumerate(items) if index not in paired and _find_key(item) is not None)
    return any(item["type"] not in OUTPUT_TYPES and not _is_among(item, native_calls) for item in unpaired)


def find_complete_calls(output: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the items of the calls that can get an output, without those that were cut off."""
    return [item for item in output if item.get("type") in OUTPUT_TYPES and item.get("status") != "incomplete"]


def find_native_calls(items: Sequence[JsonObject], types: Collection[str]) -> list[str]:
    """Return the ids of the calls of these types that the server has not run."""
    paired = _find_pairs(items)
    calls = (item for index, item in enumerate(items) if index not in paired and item.get("type") in types)
    return [str(item["call_id"]) for item in calls]


def find_invocations(items: Sequence[JsonObject], native_calls: Collection[str] = ()) -> list[ToolInvocation]:
    """Return the calls that an agent runs. `native_calls` are the ids of those that are not function calls."""
    return [to_invocation(item) for item in items if item.get("type") in OUTPUT_TYPES or _is_among(item, native_calls)]


def _is_among(item: JsonObject, native_calls: Collection[str]) -> bool:
    return bool(native_calls) and item.get("type") in CALL_NAMES and item.get("call_id") in native_calls


def to_invocation(item: JsonObject) -> ToolInvocation:
    if item.get("type") in CALL_NAMES:
        return ToolInvocation(str(item.get("call_id", "")), CALL_NAMES[item["type"]], encode_arguments(item))
    arguments = item.get("arguments", item.get("input", ""))
    return ToolInvocation(str(item.get("call_id", "")), str(item.get("name", "")), to_text(arguments))


def make_output_items(call: JsonObject, output: str | list[JsonObject]) -> list[JsonObject]:
    """Return the items of the output of a call: one, and a message after it if the item cannot state an error."""
    return [make_output_item(call, output)] if call["type"] in OUTPUT_TYPES else make_native_output(call, output)


def get_call_id(item: JsonObject) -> str | None:
    """Return the id of the call to which a call or an output belongs."""
    if item.get("type") == "local_shell_call_output":  # in the API its own id is that of the call
        return item.get("call_id") or item.get("id")
    return item.get("call_id")


def make_output_item(call: JsonObject, output: str | list[JsonObject]) -> JsonObject:
    """Return the output item of the call of a function."""
    return {"type": OUTPUT_TYPES[call["type"]], "call_id": call["call_id"], "output": output}


def shorten_output(output: str | list[JsonObject]) -> str | list[JsonObject]:
    """Return an output of a call with at most MAX_OUTPUT characters of text. Its beginning and its end stay."""
    if isinstance(output, str):
        return _shorten(output, MAX_OUTPUT)
    count = sum(len(part.get("text") or "") for part in output if isinstance(part.get("text"), str))
    if count <= MAX_OUTPUT:
        return output
    return [
        {**part, "text": _shorten(part["text"], MAX_OUTPUT * len(part["text"]) // count)}
        if isinstance(part.get("text"), str)
        else part
        for part in output
    ]


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    begin, end = text[: limit * 3 // 4], text[len(text) - limit // 4 :]
    return f"{begin}\n[{len(text) - limit:,} of {len(text):,} characters were left out here.]\n{end}"


def join_text(items: Sequence[JsonObject], *, kinds: Sequence[str] = ("output_text", "input_text", "text")) -> str:
    """Return the text of the messages among the items. Malformed content is skipped."""
    texts: list[str] = []
    for item in items:
        if item.get("type", "message") == "message":
            known = (part for part in _list_parts(item.get("content")) if part.get("type") in kinds)
            texts += [str(part.get("text") or part.get("refusal") or "") for part in known]
    return "".join(texts)


def join_output(output: str | Sequence[JsonObject]) -> str:
    """Return the text of a call's output."""
    return output if isinstance(output, str) else "".join(str(part.get("text") or "") for part in output)


def _list_parts(content: Any) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


# Encrypted reasoning


class ModelSupport(Struct):
    """State shared by the runs of an agent: the parts of its requests that the model has refused."""

    refuses_encryption: bool = False
    refuses_format: bool = False


def refuses_encryption(error: AntiphonError) -> bool:
    """Return True if the error is caused only by requesting encrypted reasoning."""
    if error.type != InvalidRequest.type:
        return False
    # Proxies may lose the parameter that the error is about.
    is_about_include = (error.param or "").startswith("include") or ENCRYPTED_REASONING in error.message
    return is_about_include or _UNSUPPORTED_MESSAGE in error.message.lower()


def refuses_format(error: AntiphonError) -> bool:
    """Return True if the model cannot answer in the format of a JSON Schema. An invalid schema is another error."""
    message = error.message.lower()
    if error.type != InvalidRequest.type or error.code == _SCHEMA_ERROR or "invalid schema" in message:
        return False
    is_about_format = any(name in message for name in _FORMAT_NAMES) or error.param in _FORMAT_PARAMS
    return is_about_format and any(word in message for word in _UNSUPPORTED_WORDS)


def cannot_decrypt(error: AntiphonError) -> bool:
    """Return True if the server cannot decrypt reasoning that was sent back to it."""
    return error.code == _DECRYPTION_ERROR


def is_encrypted(item: JsonObject) -> bool:
    return item.get("type") == "reasoning" and bool(item.get("encrypted_content"))


def drop_encrypted(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Remove encrypted content. Reasoning items with readable content stay, without the encrypted part."""
    result: list[JsonObject] = []
    for item in items:
        if is_encrypted(item):
            readable = {name: value for name, value in item.items() if name not in ("encrypted_content", "id")}
            result += [] if is_empty_reasoning(readable) else [readable]
        else:
            result.append(item)
    return result
