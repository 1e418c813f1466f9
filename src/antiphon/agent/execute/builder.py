"""From an agent's turn to a request of the Responses API."""

from typing import Any, Literal

import msgspec

from antiphon.agent.execute.envelope import AgentExecuteRequest, ConversationContext
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


Dialect = Literal["openai", "aptix"]
Streaming = bool | None
"""Whether the answer is to come as a stream; None leaves it to the server."""

# What the two dialects call a piece of text, and a choice that names a tool.
_TEXT_TYPES: dict[Dialect, str] = {"openai": "input_text", "aptix": "text"}
_CHOICE_TYPES: dict[Dialect, str] = {"openai": "function", "aptix": "tool"}


class ResponsesRequestBuilder:
    """Builds requests. The first of a conversation has the system message and the tools; those that continue it do not,
    because the response they continue has both.
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
        """The request as a JSON object. What is not set has no key."""
        if context is None:
            raise TypeError("context must not be None")
        if request is None:
            raise TypeError("request must not be None")
        initial = _is_blank(request.response_continuation_id)
        say = _Speaker(_TEXT_TYPES[dialect])
        built: dict[str, Any] = {"model": context.model_name, "temperature": context.temperature}
        if stream is not None:
            built["stream"] = stream
        if not initial:
            built["previous_response_id"] = request.response_continuation_id
        system = [say.system(context, request, tool_usage_metadata_block)] if initial else []
        built["input"] = [*system, say.user(request, rag_context_block, initial=initial)]
        tools = _read_tools(request.tools_json) if initial else None
        if tools is not None:
            built["tools"] = tools
        if request.tool_choice_name:
            built["tool_choice"] = {"type": _CHOICE_TYPES[dialect], "name": request.tool_choice_name}
        return built


class _Speaker:
    def __init__(self, text_type: str) -> None:
        self._text_type = text_type

    def system(
        self, context: ConversationContext, request: AgentExecuteRequest, usage_block: str | None
    ) -> dict[str, Any]:
        # What comes first weighs most: nothing may be put before the conversation's own system prompt.
        texts = [context.system or ""]
        if not _is_blank(request.system_prompt):
            texts.append(request.system_prompt or "")
        if usage_block:
            texts.append(usage_block)
        return self._message("system", texts)

    def user(self, request: AgentExecuteRequest, rag_block: str | None, *, initial: bool) -> dict[str, Any]:
        texts = [f"[MODE: {request.mode or ''}]\n\n[INSTRUCTION]\n{request.instruction or ''}"]
        if not _is_blank(rag_block):
            texts.append(rag_block or "")
        results = None if initial else build_tool_results(request.tool_results_json)
        if results is not None:
            texts.append(results)
        return self._message("user", texts)

    def _message(self, role: str, texts: list[str]) -> dict[str, Any]:
        return {"role": role, "content": [{"type": self._text_type, "text": text} for text in texts]}


def _read_tools(tools_json: str | None) -> list[dict[str, Any]] | None:
    """The tools of a JSON array; None when it is none. A turn without its tools is better than no turn."""
    if not tools_json:
        return None
    try:
        tools = read_json(tools_json)
    except msgspec.DecodeError:
        return None
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else None


def _is_blank(text: str | None) -> bool:
    return text is None or not text.strip()
