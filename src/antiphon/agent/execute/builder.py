"""Build a request of the Responses API from an agent's turn, with its text blocks.

The blocks are `[TOOL_RESULTS]` (results of client tools) and the usage metadata of server tools. The `[CONTEXT]` block
is in `rag.py`.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from antiphon.agent.execute.envelope import AgentExecuteRequest, ConversationContext
from antiphon.protocol.json_text import read_json, to_text

logger = logging.getLogger(__name__)

BEGIN = "<<<APTIX_SERVER_TOOL_USAGE_METADATA_BEGIN>>>"
END = "<<<APTIX_SERVER_TOOL_USAGE_METADATA_END>>>"

Dialect = Literal["openai", "aptix"]
Streaming = bool | None
"""The `stream` of the request; None omits it."""

# The type of a text part, and of a tool choice by name.
_TEXT_TYPES: dict[Dialect, str] = {"openai": "input_text", "aptix": "text"}
_CHOICE_TYPES: dict[Dialect, str] = {"openai": "function", "aptix": "tool"}

_MISSING = "(missing)"
_FLAGS = ("IsServerTool", "WasExecuted")
_BODIES = ("ArgumentsJson", "ResultJson", "ErrorMessage")


class ResponsesRequestBuilder:
    """Builds requests.

    The first request of a conversation has the system message and the tools. Continuations do not: the response that
    they continue has both.
    """

    @staticmethod
    def build(
        context: ConversationContext,
        request: AgentExecuteRequest,
        rag_context_block: str | None = None,
        tool_usage_metadata_block: str | None = None,
        stream: Streaming = None,
        *,
        dialect: Dialect = "openai",
    ) -> dict[str, Any]:
        """Return the request as a JSON object, without keys for unset values."""
        if context is None:
            raise TypeError("context must not be None")
        if request is None:
            raise TypeError("request must not be None")
        is_initial = _is_blank(request.response_continuation_id)
        messages = _MessageBuilder(_TEXT_TYPES[dialect])
        built: dict[str, Any] = {"model": context.model_name, "temperature": context.temperature}
        if stream is not None:
            built["stream"] = stream
        if not is_initial:
            built["previous_response_id"] = request.response_continuation_id
        system = [messages.build_system(context, request, tool_usage_metadata_block)] if is_initial else []
        built["input"] = [*system, messages.build_user(request, rag_context_block, is_initial=is_initial)]
        tools = _parse_tools(request.tools_json) if is_initial else None
        if tools is not None:
            built["tools"] = tools
        if request.tool_choice_name:
            built["tool_choice"] = {"type": _CHOICE_TYPES[dialect], "name": request.tool_choice_name}
        return built


class _MessageBuilder:
    def __init__(self, text_type: str) -> None:
        self._text_type = text_type

    def build_system(
        self, context: ConversationContext, request: AgentExecuteRequest, usage_block: str | None
    ) -> dict[str, Any]:
        # The system prompt of the conversation comes first: nothing may take precedence over it.
        texts = [context.system or ""]
        if not _is_blank(request.system_prompt):
            texts.append(request.system_prompt or "")
        if usage_block:
            texts.append(usage_block)
        return self._build_message("system", texts)

    def build_user(self, request: AgentExecuteRequest, rag_block: str | None, *, is_initial: bool) -> dict[str, Any]:
        texts = [f"[MODE: {request.mode or ''}]\n\n[INSTRUCTION]\n{request.instruction or ''}"]
        if not _is_blank(rag_block):
            texts.append(rag_block or "")
        results = None if is_initial else build_tool_results(request.tool_results_json)
        if results is not None:
            texts.append(results)
        return self._build_message("user", texts)

    def _build_message(self, role: str, texts: list[str]) -> dict[str, Any]:
        return {"role": role, "content": [{"type": self._text_type, "text": text} for text in texts]}


def _parse_tools(tools_json: str | None) -> list[dict[str, Any]] | None:
    """Return the tools in a JSON array; None for other text, because a malformed list must not fail the turn."""
    if not tools_json:
        return None
    try:
        tools = read_json(tools_json)
    except msgspec.DecodeError:
        return None
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else None


def _is_blank(text: str | None) -> bool:
    return text is None or not text.strip()


# The block with the usage metadata of server tools


def build_usage_block(usages: Mapping[str, str | None]) -> str | None:
    """Return the block for these tools, in their order; None if no tool has a text. Tools without one are skipped."""
    parts: list[str] = []
    for name, usage in usages.items():
        text = (usage or "").strip()
        if not text:
            logger.warning("the tool %s has no usage text and is not in the system prompt", name)
            continue
        parts += [f"<<<APTIX_TOOL_USAGE_BEGIN name='{name}'>>>", text, f"<<<APTIX_TOOL_USAGE_END name='{name}'>>>", ""]
    return "\n".join([BEGIN, *parts, END]) if parts else None


# The block with the results of client tools


def build_tool_results(tool_results_json: str | None) -> str | None:
    """Return the `[TOOL_RESULTS]` block for a JSON array of results; None for empty or malformed text."""
    try:
        results = read_json(tool_results_json or "null")
    except msgspec.DecodeError:
        return None
    entries = [_describe(result) for result in results if isinstance(result, dict)] if isinstance(results, list) else []
    if not entries:
        return None
    return "\n".join(["[TOOL_RESULTS]", "", *("\n".join(entry) + "\n" for entry in entries)]).rstrip()


def _describe(result: dict[str, Any]) -> list[str]:
    lines = [f"- CallId: {_find_name(result, 'CallId')}", f"  Name: {_find_name(result, 'Name')}"]
    for flag in _FLAGS:
        value = _find(result, flag)
        if isinstance(value, bool):
            lines.append(f"  {flag}: {'true' if value else 'false'}")
    for field in _BODIES:
        text = _find_text(result, field)
        if text.strip():
            lines += [f"  {field}:", f"    {text}"]
    return lines


def _find_name(result: dict[str, Any], field: str) -> str:
    return _find_text(result, field) or _MISSING


def _find(result: dict[str, Any], field: str) -> Any:
    """Return the field in PascalCase, else in camelCase."""
    value = result.get(field)
    return value if value is not None else result.get(field[0].lower() + field[1:])


def _find_text(result: dict[str, Any], field: str) -> str:
    value = _find(result, field)
    return "" if value is None else to_text(value)
