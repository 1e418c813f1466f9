"""From a request and the store to a turn: what the model will read, and the response as it begins."""

import time
from copy import copy

import msgspec

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.engine.items import normalize_item
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.call_pairs import check_call_pairs
from antiphon.engine.prepare.history import History, get_conversation_id, load_history
from antiphon.engine.prepare.history_repair import drop_unfinished_items
from antiphon.engine.prepare.param_paths import ParamPaths
from antiphon.engine.prepare.parameters import (
    apply_configuration_updates,
    check_capabilities,
    check_configuration_updates,
    check_media,
)
from antiphon.engine.prepare.references import check_unique_ids, resolve_references
from antiphon.engine.prepare.toolset import check_item_tools, select_tools
from antiphon.engine.respond.ids import BrandedMint, Mint
from antiphon.engine.respond.session import Session
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.expansion import (
    check_trigger,
    ends_in_trigger,
    expand_compactions,
    repair_before_trigger,
)
from antiphon.engine.serve.sealed_reasoning import screen
from antiphon.errors import InvalidRequest
from antiphon.protocol.content import InputText
from antiphon.protocol.items import Item, Message
from antiphon.protocol.request import ConversationRef, CreateRequest, JsonSchemaFormat, TextConfig, TextFormat
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A request made ready: the turn for the backend, the new input items to keep, and the response as it begins."""

    turn: Turn
    input: list[Item | Unknown]
    response: Response
    mint: Mint
    warnings: list[str]


async def resolve(
    request: CreateRequest,
    *,
    own: str | list[Item | Unknown] | None,
    project: str,
    model: Model,
    capabilities: Capabilities,
    store: Store,
    policy: Policy,
    sealer: Sealer,
    session: Session | None = None,
    mend: bool = False,
) -> Resolved:
    """Check the request, fetch what it builds on, and lay out the turn.

    `own` is the input that the client has sent; that of a prompt's template has been put before it.
    With `mend`, calls and outputs that do not belong together are mended as those in the store are, not refused; so
    are those that are to be compacted.
    """
    warnings = check_capabilities(request, capabilities, model.id)
    context = await load_history(
        request,
        project=project,
        store=store,
        sealer=sealer,
        inherit_tools=policy.inherit_tools,
        session=session,
    )
    unsupported = policy.unsupported_tools
    if request.tools is None and context.tools:
        request = msgspec.structs.replace(request, tools=context.tools)
        unsupported = "drop"  # nobody has asked for them here, and another model may have served them
    tools, left_out = select_tools(
        request,
        capabilities=capabilities,
        unsupported=unsupported,
        functions_only=policy.stateless,
        history=context.items,
    )
    mint = BrandedMint(policy.id_prefix) if policy.id_prefix else Mint()
    asked = read_input(request, mint)
    paths = ParamPaths(asked, own)
    try:
        if not mend and (request.store is not False or request.conversation is not None):
            check_unique_ids(asked)
        new_items, repeated = await _fill(request, asked, context, paths, project=project, store=store)
        left_out += _check(new_items, paths, model=model, capabilities=capabilities, policy=policy)
    except InvalidRequest as error:
        paths.rewrite_error(error)
        raise
    expanded = expand_compactions(context.items + new_items, sealer, project=project)
    items, unopened = screen(expanded.items, sealer, project=project)
    if mend or ends_in_trigger(items):
        items, unpaired = repair_before_trigger(items)
    else:
        check_call_pairs(items)
        items, unpaired = drop_unfinished_items(items)
    applied, useless = apply_configuration_updates(request, items)
    request = copy(applied)
    request.tools = tools or None
    if request.temperature is None:
        request.temperature = model.temperature
    if request.top_p is None:
        request.top_p = model.top_p
    # What continues a compaction has it expanded twice, and mended alike.
    told = dict.fromkeys((*context.repairs, *expanded.warnings, *unopened, *unpaired, *useless))
    return Resolved(
        turn=Turn(request=request, items=items, project=project, find_param=paths.find_param),
        input=new_items,
        response=begin_response(request, mint.response_id),
        mint=mint,
        # The header has room for so many: what may be many comes last.
        warnings=[
            *warnings,
            *left_out,
            *(f"history: {each}" for each in told),
            *repeated,
        ],
    )


async def _fill(
    request: CreateRequest,
    asked: list[Item | Unknown],
    context: History,
    paths: ParamPaths,
    *,
    project: str,
    store: Store,
) -> tuple[list[Item | Unknown], list[str]]:
    """The new items of what was asked, and what is to be known about the others."""
    sent = request.input if isinstance(request.input, list) else ()
    earlier = [*context.compacted, *context.items]  # in this order: an id of a call may come again
    filled = await resolve_references(asked, sent=sent, history=earlier, project=project, store=store)
    repeated = paths.rewrite_warnings(filled.warnings)
    paths.select(filled.items, filled.indexes)
    return filled.items, repeated


def _check(
    items: list[Item | Unknown], paths: ParamPaths, *, model: Model, capabilities: Capabilities, policy: Policy
) -> list[str]:
    """Raise on new items that are not as they must be. What is to be known about the tools that they bring."""
    check_trigger(items)
    check_media(items, capabilities, model.id)
    check_configuration_updates(items)
    left_out = check_item_tools(items, capabilities=capabilities, unsupported=policy.unsupported_tools)
    return paths.rewrite_warnings(left_out)


def read_input(request: CreateRequest, mint: Mint) -> list[Item | Unknown]:
    """The request's own input as items that can be stored: each with an id, messages with a list of parts."""
    if request.input is None:
        return []
    if isinstance(request.input, str):
        return [Message("user", [InputText(request.input)], mint("msg"), "completed")]
    return [normalize_item(item, mint) for item in request.input]


def begin_response(request: CreateRequest, response_id: str) -> Response:
    """The response before the model has said anything: the request's settings, with the defaults filled in."""
    conversation = get_conversation_id(request)
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
        prompt_cache_options=msgspec.to_builtins(request.prompt_cache_options),
        prompt_cache_retention=request.prompt_cache_retention,
        safety_identifier=request.safety_identifier,
        user=request.user,
        background=bool(request.background),
        prompt=request.prompt,
        conversation=None if conversation is None else ConversationRef(conversation),
    )


def _echo_text(text: TextConfig | None) -> TextConfig:
    """The text settings as the response repeats them: always with a format, and without the schema's body."""
    if text is None or text.format is None:
        return TextConfig(format=TextFormat(), verbosity=text.verbosity if text is not None else None)
    if isinstance(text.format, JsonSchemaFormat):
        echoed = msgspec.structs.replace(text.format, schema=None, strict=bool(text.format.strict))
        return TextConfig(format=echoed, verbosity=text.verbosity)
    return text
