"""Translate a turn into the body of a Messages request."""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from antiphon.backends.anthropic_messages.messages import Block, MessagesBuilder, encode_tool_name, write_text
from antiphon.backends.anthropic_messages.schema import restrict_schema
from antiphon.backends.anthropic_messages.traits import ModelTraits
from antiphon.backends.base import Turn, list_hint_parameters
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tool_lists import derive
from antiphon.protocol.tools import FunctionChoice, FunctionTool, Tools

# The fields of a body that the upstream's token count depends on.
COUNTED_FIELDS = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
# Limits of the API.
MAX_CACHE_BREAKPOINTS = 4
MAX_STRICT_TOOLS = 20

_CHOICE_AUTO = {"type": "auto"}
_CHOICE_NONE = {"type": "none"}
_SERVICE_TIERS = {"auto": "auto", "priority": "auto", "scale": "auto", "fast": "auto", "ultrafast": "auto"}
_VERBOSITY_PROMPTS = {"low": "Keep your answers short.", "high": "Answer at length and in detail."}

# Tokens for thinking, by effort, for models that take a budget.
_BUDGETS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 24_576, "max": 32_768}
_MIN_BUDGET = 1024
_MIN_ANSWER_TOKENS = 512
# The nearest effort that every model with efforts supports.
_NEAREST_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to send. `tool_names` maps the upstream names of tools to their own names."""

    body: JsonObject
    tool_names: dict[str, str]
    has_thinking: bool


def translate_request(
    turn: Turn, traits: ModelTraits, *, default_max_tokens: int | None = None, include_thinking: bool = True
) -> MessagesRequest:
    """Translate a turn. Without `include_thinking`, the model's earlier thinking is left out."""
    request = turn.request
    builder = MessagesBuilder(include_thinking=include_thinking)
    builder.add_history(turn.items)
    tools = _write_tools(request, called=builder.called_tools, strict=traits.json_schema)
    limits = _choose_limits(
        request,
        traits,
        forced=_is_call_forced(tools),
        resumable=builder.resumes_with_thinking,
        default_max_tokens=default_max_tokens,
    )
    body: JsonObject = {"model": request.model or "", "max_tokens": limits.max_tokens, "stream": True}
    schema = _find_schema(request, traits)
    if system := [*write_text(request.instructions or ""), *builder.system, *_write_format_prompts(request, schema)]:
        body["system"] = system
    body["messages"] = builder.messages
    body |= tools | _write_output_config(limits, schema) | _write_sampling(request, traits, limits)
    body |= _write_account_fields(request)
    _set_cache_breakpoints(body, request)
    tool_names = derive(request.tools or [], "anthropic_messages.names", _list_names)
    return MessagesRequest(
        body=body,
        tool_names=tool_names | {encode_tool_name(name): name for name in builder.called_tools},
        has_thinking=builder.has_thinking,
    )


def list_ignored_params(request: CreateRequest, traits: ModelTraits) -> list[str]:
    """Return the parameters that have no effect on this model, as far as the request alone shows."""
    sampling = [name for name in ("temperature", "top_p") if getattr(request, name) not in (None, 1)]
    effort = request.reasoning.effort if request.reasoning is not None else None
    wants_thinking = effort not in (None, "none")
    # Not every model can think if a call is forced.
    thinks = wants_thinking and traits.thinking != "none" and request.tool_choice in (None, "auto")
    # The body has only the first of the two.
    ignored = sampling if thinks or not traits.takes_sampling else sampling[1:]
    if wants_thinking and traits.thinking == "none":
        ignored = [*ignored, "reasoning.effort"]
    return [*ignored, *(name for name in list_hint_parameters(request) if name == "client_metadata")]


# Thinking and the length of the answer


class _OutputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The body's `max_tokens` and `thinking`, and the `effort` in its `output_config`."""

    max_tokens: int
    thinking: JsonObject | None = None
    effort: str | None = None

    @property
    def is_thinking(self) -> bool:
        return self.thinking is not None and self.thinking["type"] in {"adaptive", "enabled"}


def _choose_limits(
    request: CreateRequest, traits: ModelTraits, *, forced: bool, resumable: bool, default_max_tokens: int | None
) -> _OutputLimits:
    """Choose the limits for a turn.

    With `forced`, the model must call a tool, and some models cannot think then. Without `resumable`, the turn answers
    calls that began without thinking, and models with a budget reject thinking there.
    """
    usual = min(default_max_tokens or traits.default_max_tokens, traits.highest_max_tokens)
    plain = _OutputLimits(max_tokens=request.max_output_tokens or usual)
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort == "none":
        return _disable_thinking(plain, traits)
    if traits.thinking == "none" or not (effort or (request.reasoning is not None and request.reasoning.summary)):
        return plain
    if traits.thinking == "budget":
        return _choose_budget(request, traits, effort or "medium", usual) if resumable and not forced else plain
    level = _NEAREST_EFFORTS.get(effort, effort) if effort and effort not in traits.efforts else effort
    # Newer models omit their thinking from the answer unless a display is set.
    thinking = {"type": "adaptive", "display": "summarized"} if traits.can_think_if_forced or not forced else None
    return msgspec.structs.replace(plain, thinking=thinking, effort=level)


def _choose_budget(request: CreateRequest, traits: ModelTraits, effort: str, usual: int) -> _OutputLimits:
    budget = _BUDGETS[effort]
    max_tokens = request.max_output_tokens or min(usual + budget, traits.highest_max_tokens)
    budget = min(budget, max_tokens - _MIN_ANSWER_TOKENS)
    if budget < _MIN_BUDGET:
        return _OutputLimits(max_tokens=max_tokens)
    return _OutputLimits(max_tokens=max_tokens, thinking={"type": "enabled", "budget_tokens": budget})


def _disable_thinking(plain: _OutputLimits, traits: ModelTraits) -> _OutputLimits:
    if traits.thinking_off == "omit":
        return plain
    if traits.thinking_off == "never":
        return msgspec.structs.replace(plain, effort=traits.efforts[0])
    return msgspec.structs.replace(plain, thinking={"type": traits.thinking_off})


# Tools


def _write_tools(request: CreateRequest, *, called: Iterable[str], strict: bool) -> JsonObject:
    """Return `tools` and `tool_choice`.

    `called` are the tools that the history has calls of. If the request has no tools, these are declared and disabled:
    the API wants a declaration of every tool in the history.
    """
    written = derive(request.tools or [], ("anthropic_messages", strict), partial(_write_functions, strict=strict))
    if not written:
        known = [_write_tool(FunctionTool(name), strict=False) for name in called]
        return {"tools": known, "tool_choice": _CHOICE_NONE} if known else {}
    fields: JsonObject = {"tools": [*written[:-1], dict(written[-1])]}  # the last one may get a cache breakpoint
    choice = _write_choice(request.tool_choice)
    if request.parallel_tool_calls is False and choice != _CHOICE_NONE:
        choice = choice | {"disable_parallel_tool_use": True}
    if choice != _CHOICE_AUTO:
        fields["tool_choice"] = choice
    return fields


def _write_functions(tools: Tools, *, strict: bool) -> list[JsonObject]:
    """Return the functions among the tools. Too many strict schemas are not enforced."""
    functions = [tool for tool in tools if isinstance(tool, FunctionTool)]
    strict = strict and sum(bool(tool.strict) for tool in functions) <= MAX_STRICT_TOOLS
    return [_write_tool(tool, strict=strict) for tool in functions]


def _list_names(tools: Tools) -> dict[str, str]:
    """Map the upstream names of functions to their own names."""
    return {encode_tool_name(tool.name): tool.name for tool in tools if isinstance(tool, FunctionTool)}


def _is_call_forced(tool_fields: JsonObject) -> bool:
    return tool_fields.get("tool_choice", _CHOICE_AUTO)["type"] in {"any", "tool"}


def _write_choice(choice: Any) -> JsonObject:
    if isinstance(choice, FunctionChoice):
        return {"type": "tool", "name": encode_tool_name(choice.name)}
    if choice == "required":
        return {"type": "any"}
    return _CHOICE_NONE if choice == "none" else _CHOICE_AUTO


def _write_tool(tool: FunctionTool, *, strict: bool) -> JsonObject:
    fields: JsonObject = {"name": encode_tool_name(tool.name)}
    if tool.description:
        fields["description"] = tool.description
    parameters = tool.parameters or {}
    restricted = restrict_schema({"type": "object"} | parameters) if strict and tool.strict else None
    if restricted is not None:
        return fields | {"input_schema": restricted, "strict": True}
    return fields | {"input_schema": {"type": "object", "properties": {}} | parameters}


# Output format, sampling and account fields


def _find_schema(request: CreateRequest, traits: ModelTraits) -> JsonObject | None:
    """Return the output schema; None if there is none or the API cannot enforce it."""
    text_format = request.text.format if request.text is not None else None
    if not isinstance(text_format, JsonSchemaFormat) or not traits.json_schema:
        return None
    return restrict_schema(text_format.schema or {})


def _write_output_config(limits: _OutputLimits, schema: JsonObject | None) -> JsonObject:
    fields: JsonObject = {} if limits.thinking is None else {"thinking": limits.thinking}
    config: JsonObject = {} if limits.effort is None else {"effort": limits.effort}
    if schema is not None:
        config["format"] = {"type": "json_schema", "schema": schema}
    return fields | ({"output_config": config} if config else {})


def _write_format_prompts(request: CreateRequest, schema: JsonObject | None) -> list[Block]:
    """Return instructions for output settings that the API has no parameter for."""
    if request.text is None:
        return []
    verbosity, text_format = request.text.verbosity, request.text.format
    prompts = [_VERBOSITY_PROMPTS[verbosity]] if verbosity in _VERBOSITY_PROMPTS else []
    if isinstance(text_format, JsonObjectFormat):
        prompts.append("Answer with a JSON object and nothing else.")
    elif isinstance(text_format, JsonSchemaFormat) and schema is None:
        name, description = text_format.name, text_format.description
        about = f"{name} ({description})" if description else name
        written = json.dumps(text_format.schema, ensure_ascii=False)
        prompts.append(f"Answer with a JSON value and nothing else: {about}, which fits this schema:\n{written}")
    return [block for prompt in prompts for block in write_text(prompt)]


def _write_sampling(request: CreateRequest, traits: ModelTraits, limits: _OutputLimits) -> JsonObject:
    """Return `temperature` or `top_p`.

    The API's highest temperature is 1. It takes one of the two fields, and neither together with thinking.
    """
    if limits.is_thinking or not traits.takes_sampling:
        return {}
    if request.temperature is not None and request.temperature != 1:
        return {"temperature": min(request.temperature, 1.0)}
    if request.top_p is not None and request.top_p != 1:
        return {"top_p": request.top_p}
    return {}


def _write_account_fields(request: CreateRequest) -> JsonObject:
    fields: JsonObject = {}
    if request.service_tier is not None:
        fields["service_tier"] = _SERVICE_TIERS.get(request.service_tier, "standard_only")
    if user := request.safety_identifier or request.user:
        fields["metadata"] = {"user_id": user}
    return fields


# Prompt caching


def _set_cache_breakpoints(body: JsonObject, request: CreateRequest) -> None:
    """Set `cache_control` on the blocks that the request marks and, if it enables caching, on the usual ones.

    The API wants blocks with a long lifetime first. So all blocks get the longest lifetime that any of them has.
    """
    explicit = [block for block in _list_blocks(body) if "cache_control" in block]
    chosen = explicit[-MAX_CACHE_BREAKPOINTS:]
    if _wants_automatic_breakpoints(request):
        for block in _list_usual_breakpoints(body):
            if len(chosen) < MAX_CACHE_BREAKPOINTS and all(block is not each for each in chosen):
                chosen.append(block)
    lifetimes = {block.pop("cache_control")["ttl"] for block in explicit}
    is_long = _wants_long_lifetime(request) or "1h" in lifetimes
    for block in chosen:
        block["cache_control"] = {"type": "ephemeral", "ttl": "1h"} if is_long else {"type": "ephemeral"}


def _wants_automatic_breakpoints(request: CreateRequest) -> bool:
    options = request.prompt_cache_options
    if options is not None and options.mode == "explicit":
        return False
    return bool(request.prompt_cache_key or request.prompt_cache_retention or options)


def _wants_long_lifetime(request: CreateRequest) -> bool:
    options = request.prompt_cache_options
    return request.prompt_cache_retention == "24h" or (options is not None and options.ttl == "12h")


def _list_blocks(body: JsonObject) -> Iterator[JsonObject]:
    yield from body.get("system", ())
    for message in body["messages"]:
        yield from (block for block in message["content"] if isinstance(block, dict))


def _list_usual_breakpoints(body: JsonObject) -> Iterator[JsonObject]:
    """Yield the last blocks of the instructions, the tools, and the last two user messages."""
    for name in ("system", "tools"):
        if body.get(name):
            yield body[name][-1]
    user_messages = [message for message in body["messages"] if message["role"] == "user"]
    for message in reversed(user_messages[-2:]):
        yield message["content"][-1]
