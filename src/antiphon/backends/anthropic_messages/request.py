"""A turn as the body of a Messages request."""

import json
from typing import Any

import msgspec

from antiphon.backends.anthropic_messages import cache
from antiphon.backends.anthropic_messages.blocks import Block, write_text
from antiphon.backends.anthropic_messages.dialogue import Dialogue
from antiphon.backends.anthropic_messages.names import name_tool
from antiphon.backends.anthropic_messages.schema import fit
from antiphon.backends.anthropic_messages.thinking import Plan, plan
from antiphon.backends.anthropic_messages.tools import is_forced, write_tools
from antiphon.backends.anthropic_messages.traits import Traits
from antiphon.backends.base import Turn, list_hints
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tools import FunctionTool

Json = dict[str, Any]

COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
"""What of a body the upstream wants to see to count its tokens."""

_TIERS = {"auto": "auto", "priority": "auto", "scale": "auto", "fast": "auto", "ultrafast": "auto"}
_LENGTHS = {"low": "Keep your answers short.", "high": "Answer at length and in detail."}


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. `names` are the tools' own names, by those they go by upstream."""

    body: Json
    names: dict[str, str]
    has_thoughts: bool


def compose(turn: Turn, traits: Traits, *, answer: int | None = None, thoughts: bool = True) -> Composition:
    """The request for a turn. Without `thoughts`, the model is not given back what it thought before."""
    request = turn.request
    dialogue = Dialogue(thoughts=thoughts)
    dialogue.tell(turn.items)
    tools = write_tools(request, called=dialogue.called, strict=traits.json_schema)
    planned = plan(request, traits, forced=is_forced(tools), resumable=dialogue.thinks_first, answer=answer)
    body: Json = {"model": request.model or "", "max_tokens": planned.max_tokens, "stream": True}
    schema = _find_schema(request, traits)
    if system := [*write_text(request.instructions or ""), *dialogue.system, *_write_wishes(request, schema)]:
        body["system"] = system
    body["messages"] = dialogue.messages
    body |= tools | _write_output(planned, schema) | _write_sampling(request, traits, planned)
    body |= _write_sender(request)
    cache.mark(body, request)
    offered = [tool.name for tool in request.tools or () if isinstance(tool, FunctionTool)]
    return Composition(
        body=body,
        names={name_tool(name): name for name in (*offered, *dialogue.called)},
        has_thoughts=dialogue.has_thoughts,
    )


def _find_schema(request: CreateRequest, traits: Traits) -> Json | None:
    """The schema that the answer will be held to; None if there is none, or none that the API can enforce."""
    asked = request.text.format if request.text is not None else None
    return fit(asked.schema or {}) if isinstance(asked, JsonSchemaFormat) and traits.json_schema else None


def _write_output(planned: Plan, schema: Json | None) -> Json:
    written: Json = {} if planned.thinking is None else {"thinking": planned.thinking}
    output: Json = {} if planned.effort is None else {"effort": planned.effort}
    if schema is not None:
        output["format"] = {"type": "json_schema", "schema": schema}
    return written | ({"output_config": output} if output else {})


def _write_wishes(request: CreateRequest, schema: Json | None) -> list[Block]:
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


def _write_sampling(request: CreateRequest, traits: Traits, planned: Plan) -> Json:
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


def _write_sender(request: CreateRequest) -> Json:
    written: Json = {}
    if request.service_tier is not None:
        written["service_tier"] = _TIERS.get(request.service_tier, "standard_only")
    if user := request.safety_identifier or request.user:
        written["metadata"] = {"user_id": user}
    return written
