"""Translation of a turn to the body of a Chat Completions request."""

from operator import attrgetter

from msgspec import Raw

from antiphon.backends.base import Turn, list_hint_parameters
from antiphon.backends.chat_completions.messages import make_messages
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.protocol import codec
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest, Effort, Format, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tool_lists import derive
from antiphon.protocol.tools import FunctionChoice, FunctionTool, Tools

# Parameters with the same name in both APIs. `store` is left out: Antiphon stores the state.
_SAME_NAMES = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_get_same_names = attrgetter(*_SAME_NAMES)
_NONE_SET = (None,) * len(_SAME_NAMES)


def make_body(turn: Turn, quirks: Quirks, *, stream: bool = True) -> JsonObject:
    """Return the request body. Parameters that the request does not set are left to the server's defaults."""
    request = turn.request
    body: JsonObject = {"model": request.model or "", "messages": make_messages(turn, quirks), "stream": stream}
    if stream and quirks.stream_usage:
        body["stream_options"] = {"include_usage": True}
    if request.tools:
        _add_tools(body, request, request.tools, quirks)
    values = _get_same_names(request)
    if values != _NONE_SET:
        body |= {name: value for name, value in zip(_SAME_NAMES, values, strict=True) if value is not None}
    if request.max_output_tokens is not None:
        body[quirks.max_tokens_field] = request.max_output_tokens
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.text is not None:
        body |= _write_format(request.text.format)
    if request.reasoning is not None:
        body |= _write_effort(request.reasoning.effort, quirks)
    if quirks.hints:
        body |= _write_hints(request, quirks)
    return body


def _add_tools(body: JsonObject, request: CreateRequest, tools: Tools, quirks: Quirks) -> None:
    """Add `tools` and `tool_choice`. With the choice `none`, no tools are sent."""
    choice = request.tool_choice
    if choice == "none":
        return
    if isinstance(choice, FunctionChoice) and not quirks.named_choice:
        name = choice.name
        choice, tools = "required", [tool for tool in tools if isinstance(tool, FunctionTool) and tool.name == name]
    written = derive(tools, "chat_completions", _write_tools)
    if written is None:
        return
    body["tools"] = written
    if isinstance(choice, FunctionChoice):
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice == "required":
        body["tool_choice"] = "required"
    if request.parallel_tool_calls is not None:
        body["parallel_tool_calls"] = request.parallel_tool_calls


def _write_tools(tools: Tools) -> Raw | None:
    """Return the JSON of the functions among the tools, or None if there are none."""
    functions = [_write_tool(tool) for tool in tools if isinstance(tool, FunctionTool)]
    return Raw(codec.encode(functions)) if functions else None


def _write_tool(tool: FunctionTool) -> JsonObject:
    function: JsonObject = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _write_format(text_format: Format | None) -> JsonObject:
    if isinstance(text_format, JsonObjectFormat):
        return {"response_format": {"type": "json_object"}}
    if not isinstance(text_format, JsonSchemaFormat):
        return {}
    schema: JsonObject = {"name": text_format.name, "schema": text_format.schema or {}}
    if text_format.description is not None:
        schema["description"] = text_format.description
    if text_format.strict is not None:
        schema["strict"] = text_format.strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _write_effort(effort: Effort | None, quirks: Quirks) -> JsonObject:
    if effort is None or quirks.reasoning_effort == "omit":
        return {}
    word = quirks.effort_words.get(effort, effort)
    if quirks.reasoning_effort == "reasoning.effort":
        return {"reasoning": {"effort": word}}
    return {"reasoning_effort": word}


def _write_hints(request: CreateRequest, quirks: Quirks) -> JsonObject:
    """Return the hints that the server supports. Other servers would reject the whole request."""
    known: JsonObject = {
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": "in_memory"
        if request.prompt_cache_retention == "in-memory"
        else request.prompt_cache_retention,
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier,
        "user": request.user,
        "verbosity": request.text.verbosity if request.text is not None else None,
    }
    return {name: known[name] for name in quirks.hints if known[name] is not None}


def list_ignored_params(request: CreateRequest, quirks: Quirks) -> list[str]:
    """Return the parameters of a request that are left out of its body."""
    ignored = [name for name in list_hint_parameters(request) if name.removeprefix("text.") not in quirks.hints]
    if quirks.reasoning_effort == "omit" and request.reasoning is not None and request.reasoning.effort is not None:
        ignored.append("reasoning.effort")
    return ignored
