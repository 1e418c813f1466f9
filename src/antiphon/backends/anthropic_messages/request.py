"""A turn as the body of a Messages request."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from antiphon.backends.anthropic_messages.messages import Block, Dialogue, name_tool, write_text
from antiphon.backends.anthropic_messages.schema import fit
from antiphon.backends.anthropic_messages.traits import Traits
from antiphon.backends.base import Turn, list_hints
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tools import FunctionChoice, FunctionTool

MOST_MARKS = 4


def mark(body: JsonObject, request: CreateRequest) -> None:
    """Mark the body's blocks: those that the request marks itself, and where it asks for caching, the usual places.

    The API wants the long-lived marks before the others, so all get the longest time that any of them asks for.
    """
    own = [block for block in _list_content(body) if "cache_control" in block]
    chosen = own[-MOST_MARKS:]
    if _wants_marks(request):
        for block in _list_usual(body):
            if len(chosen) < MOST_MARKS and all(block is not each for each in chosen):
                chosen.append(block)
    asked = {block.pop("cache_control")["ttl"] for block in own}
    long = _lasts_long(request) or "1h" in asked
    for block in chosen:
        block["cache_control"] = {"type": "ephemeral", "ttl": "1h"} if long else {"type": "ephemeral"}


def _wants_marks(request: CreateRequest) -> bool:
    options = request.prompt_cache_options
    if options is not None and options.mode == "explicit":
        return False
    return bool(request.prompt_cache_key or request.prompt_cache_retention or options)


def _lasts_long(request: CreateRequest) -> bool:
    options = request.prompt_cache_options
    return request.prompt_cache_retention == "24h" or (options is not None and options.ttl == "12h")


def _list_content(body: JsonObject) -> Iterator[JsonObject]:
    yield from body.get("system", ())
    for message in body["messages"]:
        yield from (block for block in message["content"] if isinstance(block, dict))


def _list_usual(body: JsonObject) -> Iterator[JsonObject]:
    """The ends of the instructions, of the tools, of what is new, and of what was new the last time."""
    for name in ("system", "tools"):
        if body.get(name):
            yield body[name][-1]
    said = [message for message in body["messages"] if message["role"] == "user"]
    for message in reversed(said[-2:]):
        yield message["content"][-1]


_BUDGETS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 24_576, "max": 32_768}
_SMALLEST_BUDGET = 1024
_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}
_SHORTEST_ANSWER = 512


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the body. `effort` is for `output_config`."""

    max_tokens: int
    thinking: JsonObject | None = None
    effort: str | None = None

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking["type"] in {"adaptive", "enabled"}


def plan(request: CreateRequest, traits: Traits, *, forced: bool, resumable: bool, answer: int | None) -> Plan:
    """The plan for a turn.

    `forced`: the model must call a tool, and some cannot think then. `resumable`: the calls that are being answered
    began with thinking, without which a model with a budget cannot go on. `answer` is the answer's usual length.
    """
    usual = min(answer or traits.answer, traits.longest)
    plain = Plan(max_tokens=request.max_output_tokens or usual)
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort == "none":
        return _stop_thinking(plain, traits)
    if traits.thinking == "none" or not (effort or (request.reasoning is not None and request.reasoning.summary)):
        return plain
    if traits.thinking == "budget":
        return _plan_budget(request, traits, effort or "medium", usual) if resumable and not forced else plain
    level = _NEAREST.get(effort, effort) if effort and effort not in traits.efforts else effort
    # Newer models keep their thinking to themselves unless they are asked for it.
    thinking = {"type": "adaptive", "display": "summarized"} if traits.forced or not forced else None
    return msgspec.structs.replace(plain, thinking=thinking, effort=level)


def _plan_budget(request: CreateRequest, traits: Traits, effort: str, usual: int) -> Plan:
    budget = _BUDGETS[effort]
    longest = request.max_output_tokens or min(usual + budget, traits.longest)
    budget = min(budget, longest - _SHORTEST_ANSWER)
    if budget < _SMALLEST_BUDGET:
        return Plan(max_tokens=longest)
    return Plan(max_tokens=longest, thinking={"type": "enabled", "budget_tokens": budget})


def _stop_thinking(plain: Plan, traits: Traits) -> Plan:
    if traits.off == "omit":
        return plain
    if traits.off == "never":
        return msgspec.structs.replace(plain, effort=traits.efforts[0])
    return msgspec.structs.replace(plain, thinking={"type": traits.off})


MOST_STRICT_TOOLS = 20
"""The API refuses a request that has more."""


def write_tools(request: CreateRequest, *, called: Iterable[str], strict: bool) -> JsonObject:
    """`tools` and `tool_choice`. `called` are the tools that the history has calls of: the API wants to know them."""
    choice, tools = request.tool_choice, [tool for tool in request.tools or () if isinstance(tool, FunctionTool)]
    if not tools:
        known = [FunctionTool(name) for name in called]
        return {"tools": [_write_tool(tool, strict=False) for tool in known], "tool_choice": _NONE} if known else {}
    strict = strict and sum(bool(tool.strict) for tool in tools) <= MOST_STRICT_TOOLS
    written: JsonObject = {"tools": [_write_tool(tool, strict=strict) for tool in tools]}
    chosen = _write_choice(choice)
    if request.parallel_tool_calls is False and chosen != _NONE:
        chosen = chosen | {"disable_parallel_tool_use": True}
    if chosen != _AUTO:
        written["tool_choice"] = chosen
    return written


def is_forced(written: JsonObject) -> bool:
    """Whether the model has to call a tool."""
    return written.get("tool_choice", _AUTO)["type"] in {"any", "tool"}


_AUTO = {"type": "auto"}
_NONE = {"type": "none"}


def _write_choice(choice: Any) -> JsonObject:
    if isinstance(choice, FunctionChoice):
        return {"type": "tool", "name": name_tool(choice.name)}
    if choice == "required":
        return {"type": "any"}
    return _NONE if choice == "none" else _AUTO


def _write_tool(tool: FunctionTool, *, strict: bool) -> JsonObject:
    written: JsonObject = {"name": name_tool(tool.name)}
    if tool.description:
        written["description"] = tool.description
    parameters = tool.parameters or {}
    fitted = fit({"type": "object"} | parameters) if strict and tool.strict else None
    if fitted is not None:
        return written | {"input_schema": fitted, "strict": True}
    return written | {"input_schema": {"type": "object", "properties": {}} | parameters}


COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
"""What of a body the upstream wants to see to count its tokens."""

_TIERS = {"auto": "auto", "priority": "auto", "scale": "auto", "fast": "auto", "ultrafast": "auto"}
_LENGTHS = {"low": "Keep your answers short.", "high": "Answer at length and in detail."}


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. `names` are the tools' own names, by those they go by upstream."""

    body: JsonObject
    names: dict[str, str]
    has_thoughts: bool


def compose(turn: Turn, traits: Traits, *, answer: int | None = None, thoughts: bool = True) -> Composition:
    """The request for a turn. Without `thoughts`, the model is not given back what it thought before."""
    request = turn.request
    dialogue = Dialogue(thoughts=thoughts)
    dialogue.tell(turn.items)
    tools = write_tools(request, called=dialogue.called, strict=traits.json_schema)
    planned = plan(request, traits, forced=is_forced(tools), resumable=dialogue.thinks_first, answer=answer)
    body: JsonObject = {"model": request.model or "", "max_tokens": planned.max_tokens, "stream": True}
    schema = _find_schema(request, traits)
    if system := [*write_text(request.instructions or ""), *dialogue.system, *_write_wishes(request, schema)]:
        body["system"] = system
    body["messages"] = dialogue.messages
    body |= tools | _write_output(planned, schema) | _write_sampling(request, traits, planned)
    body |= _write_sender(request)
    mark(body, request)
    offered = [tool.name for tool in request.tools or () if isinstance(tool, FunctionTool)]
    return Composition(
        body=body,
        names={name_tool(name): name for name in (*offered, *dialogue.called)},
        has_thoughts=dialogue.has_thoughts,
    )


def _find_schema(request: CreateRequest, traits: Traits) -> JsonObject | None:
    """The schema that the answer will be held to; None if there is none, or none that the API can enforce."""
    asked = request.text.format if request.text is not None else None
    return fit(asked.schema or {}) if isinstance(asked, JsonSchemaFormat) and traits.json_schema else None


def _write_output(planned: Plan, schema: JsonObject | None) -> JsonObject:
    written: JsonObject = {} if planned.thinking is None else {"thinking": planned.thinking}
    output: JsonObject = {} if planned.effort is None else {"effort": planned.effort}
    if schema is not None:
        output["format"] = {"type": "json_schema", "schema": schema}
    return written | ({"output_config": output} if output else {})


def _write_wishes(request: CreateRequest, schema: JsonObject | None) -> list[Block]:
    """What the API has no parameter for, said in words."""
    if request.text is None:
        return []
    wishes = [_LENGTHS[request.text.verbosity]] if request.text.verbosity in _LENGTHS else []
    asked = request.text.format
    if isinstance(asked, JsonObjectFormat):
        wishes.append("Answer with a JSON object and nothing else.")
    elif isinstance(asked, JsonSchemaFormat) and schema is None:
        about = f"{asked.name} ({asked.description})" if asked.description else asked.name
        written = json.dumps(asked.schema, ensure_ascii=False)
        wishes.append(f"Answer with a JSON value and nothing else: {about}, which fits this schema:\n{written}")
    return [block for wish in wishes for block in write_text(wish)]


def _write_sampling(request: CreateRequest, traits: Traits, planned: Plan) -> JsonObject:
    """The temperature ends at 1 here. A model that thinks takes none, and no model takes `top_p` along with one."""
    if planned.thinks or not traits.sampling:
        return {}
    if request.temperature is not None and request.temperature != 1:
        return {"temperature": min(request.temperature, 1.0)}
    if request.top_p is not None and request.top_p != 1:
        return {"top_p": request.top_p}
    return {}


def list_idle(request: CreateRequest, traits: Traits) -> list[str]:
    """Which parameters of a request are left out of its body, as far as the request alone tells."""
    asked = [name for name in ("temperature", "top_p") if getattr(request, name) not in (None, 1)]
    effort = request.reasoning.effort if request.reasoning is not None else None
    wants_thought = effort not in (None, "none")
    # Where a call is forced, not every model thinks.
    thinks = wants_thought and traits.thinking != "none" and request.tool_choice in (None, "auto")
    # Of the two, only the first is sent.
    idle = asked if thinks or not traits.sampling else asked[1:]
    if wants_thought and traits.thinking == "none":
        idle = [*idle, "reasoning.effort"]
    return [*idle, *(name for name in list_hints(request) if name == "client_metadata")]


def _write_sender(request: CreateRequest) -> JsonObject:
    written: JsonObject = {}
    if request.service_tier is not None:
        written["service_tier"] = _TIERS.get(request.service_tier, "standard_only")
    if user := request.safety_identifier or request.user:
        written["metadata"] = {"user_id": user}
    return written
