"""From a request and the store to a turn: what the model will read, and the response as it begins."""

import time

import msgspec

from antiphon.backends.base import Capabilities, Turn
from antiphon.engine.history import check_input, check_pairs, drop_cut_calls
from antiphon.engine.ids import Mint
from antiphon.engine.parameters import check_capabilities
from antiphon.engine.toolset import select_tools
from antiphon.errors import PreviousResponseNotFound
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.items import Item, Message
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest, JsonSchemaFormat, TextConfig, TextFormat
from antiphon.protocol.response import Response
from antiphon.store.base import Store


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A request made ready: the turn for the backend, the new input items to keep, and the response as it begins."""

    turn: Turn
    input: list[Item | Unknown]
    response: Response
    mint: Mint
    warnings: list[str]


async def resolve(
    request: CreateRequest, *, project: str, model: str, capabilities: Capabilities, store: Store
) -> Resolved:
    """Check the request, fetch what it builds on, and lay out the turn."""
    warnings = check_capabilities(request, capabilities, model)
    tools, left_out = select_tools(request)
    mint = Mint()
    new_items = read_input(request, mint)
    check_input(new_items, capabilities, model)
    items = new_items
    if request.previous_response_id is not None:
        earlier = await _fetch_chain(store, project, request.previous_response_id)
        items = drop_cut_calls(earlier) + new_items
    check_pairs(items)
    request = msgspec.structs.replace(request, model=model, tools=tools or None)
    return Resolved(
        turn=Turn(request=request, items=items),
        input=new_items,
        response=begin_response(request, mint.response_id),
        mint=mint,
        warnings=warnings + left_out,
    )


async def _fetch_chain(store: Store, project: str, response_id: str) -> list[Item | Unknown]:
    chain = await store.chain(project, response_id)
    missing = response_id if not chain else chain[0].previous_response_id
    if missing is not None:
        raise PreviousResponseNotFound(
            f"Previous response with id '{missing}' not found.", param="previous_response_id"
        )
    return [item for link in chain for item in link.items]


def read_input(request: CreateRequest, mint: Mint) -> list[Item | Unknown]:
    """The request's own input as items that can be stored: each with an id, messages with a list of parts."""
    if request.input is None:
        return []
    if isinstance(request.input, str):
        return [Message("user", [InputText(request.input)], mint("msg"), "completed")]
    return [_identify(item, mint) for item in request.input]


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}


def _identify(item: Item | Unknown, mint: Mint) -> Item | Unknown:
    if isinstance(item, Unknown):
        return item
    changes: dict[str, object] = {}
    if item.id is None:
        changes["id"] = mint(_PREFIXES.get(item.type, "item"))
    if getattr(item, "status", "none") is None:
        changes["status"] = "completed"
    if isinstance(item, Message) and isinstance(item.content, str):
        part = OutputText(item.content) if item.role == "assistant" else InputText(item.content)
        changes["content"] = [part]
    return msgspec.structs.replace(item, **changes) if changes else item


def begin_response(request: CreateRequest, response_id: str) -> Response:
    """The response before the model has said anything: the request's settings, with the defaults filled in."""
    return Response(
        id=response_id,
        created_at=int(time.time()),
        model=request.model or "",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning,
        service_tier="default" if request.service_tier in (None, "auto") else request.service_tier,
        store=request.store is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=_echo_text(request.text),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        truncation=request.truncation or "disabled",
        metadata=request.metadata or {},
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        safety_identifier=request.safety_identifier,
        user=request.user,
    )


def _echo_text(text: TextConfig | None) -> TextConfig:
    """The text settings as the response repeats them: always with a format, and without the schema's body."""
    if text is None or text.format is None:
        return TextConfig(format=TextFormat(), verbosity=text.verbosity if text is not None else None)
    if isinstance(text.format, JsonSchemaFormat):
        echoed = msgspec.structs.replace(text.format, schema=None, strict=bool(text.format.strict))
        return TextConfig(format=echoed, verbosity=text.verbosity)
    return text
