"""Preparation: from a request and the store to a turn for the model.

A request is prepared when it is accepted. A queued one is prepared again when it starts, because the context it
continues may have changed in the meantime.
"""

import time
from collections.abc import Sequence
from functools import partial

import msgspec

from antiphon import offload
from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.engine.items import normalize_items
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.approvals import check_approvals
from antiphon.engine.prepare.call_pairs import check_call_pairs
from antiphon.engine.prepare.counts import check_counts
from antiphon.engine.prepare.history import History, load_history
from antiphon.engine.prepare.history_repair import drop_unfinished_items
from antiphon.engine.prepare.media import MediaResolver
from antiphon.engine.prepare.param_paths import ParamPaths
from antiphon.engine.prepare.parameters import (
    apply_configuration_updates,
    check_capabilities,
    check_configuration_updates,
    check_media,
    check_parameters,
)
from antiphon.engine.prepare.references import check_unique_ids, resolve_references
from antiphon.engine.prepare.toolset import check_item_tools, explain_inherited_tools, select_tools
from antiphon.engine.prepare.unknown_types import check_unknown_types
from antiphon.engine.prompts import Prompts
from antiphon.engine.respond.connection_memory import ConnectionMemory
from antiphon.engine.respond.ids import BrandedMint, Mint
from antiphon.engine.respond.stateless import remove_state
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.expansion import (
    check_trigger,
    ends_in_trigger,
    expand_compactions,
    repair_before_trigger,
)
from antiphon.engine.serve.hosted.loop import HostedLoop
from antiphon.engine.serve.routing import Candidate, ModelRoute, ModelRouter
from antiphon.engine.serve.sealed_reasoning import drop_unreadable_seals
from antiphon.engine.serve.tool_emulation.grammar_check import GrammarCheck, have_grammars, have_tools
from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.offload import is_large
from antiphon.protocol.content import InputText
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
)
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tool_lists import SharedTools
from antiphon.protocol.tools import Tool, has_credentials, hide_credentials
from antiphon.protocol.unions import Unknown, copy_struct
from antiphon.store.base import Store
from antiphon.store.history_budget import HistoryShare
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS
from antiphon.upstream.media_urls import check_media_urls, has_media

Items = list[Item | Unknown]

_MESSAGE_ONLY = frozenset({Message})
# Items that refer to no stored item, and contain no tools, settings or seals.
_SELF_CONTAINED = _MESSAGE_ONLY | {FunctionCall, FunctionCallOutput, CustomToolCall, CustomToolCallOutput}
_NO_TYPES: frozenset[str] = frozenset()
_NO_HISTORY = History()


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request made ready for the model.

    `turn` is the model call and `route` the candidates for it. `input` are the new items to store. `warnings` are for
    the client; `repairs` are those among them that concern the history. `is_hosted`: the request has tools that this
    server runs. `inherits_tools`: they are those of the previous response. `shown_tools` are the tools as the response
    shows them, if they differ from the request's. `has_own_ids`: the ids of all input items are from `mint`.
    """

    turn: Turn
    route: ModelRoute
    input: Items
    mint: Mint
    created_at: int
    warnings: Sequence[str]
    repairs: Sequence[str]
    is_hosted: bool = False
    inherits_tools: bool = False
    shown_tools: list[Tool | Unknown] | None = None
    has_own_ids: bool = False


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a queued request that were fixed when it was accepted.

    `is_suspect`: the process of an earlier attempt has died.
    """

    input: Items
    mint: Mint
    is_suspect: bool = False


class Preparer:
    """Prepares requests for the models of a router, on the state in a store."""

    def __init__(
        self,
        *,
        router: ModelRouter,
        store: Store,
        prompts: Prompts,
        policy: Policy,
        sealer: Sealer,
        grammars: GrammarCheck | None = None,
        hosted: HostedLoop | None = None,
        media: MediaResolver | None = None,
    ) -> None:
        self._router = router
        self._media = media or MediaResolver(FileServiceLoader())
        self._hosted = hosted or HostedLoop(NO_HOSTED_TOOLS, sealer, max_calls=0, run_locally=False)
        self._grammars = grammars or GrammarCheck(policy.grammar_limits)
        self._store = store
        self._prompts = prompts
        self._policy = policy
        self._sealer = sealer

    async def prepare(
        self,
        request: CreateRequest,
        *,
        project: str,
        memory: ConnectionMemory | None = None,
        repair: bool = False,
        share: HistoryShare | None = None,
    ) -> Prepared:
        """Check the request, load the context it continues, and lay out the turn.

        With `repair`, calls and outputs of the input that do not match are repaired like those in the store instead of
        refused. Room for stored items is reserved in `share`, which the caller closes when the turn has ended.
        """
        warnings: list[str] = []
        client_input = request.input
        if request.prompt is not None or self._policy.stateless:
            request, warnings = await self._complete_request(request, project, memory)
        self._check_request(request, client_input, memory, may_be_empty=repair)
        route = self._router.find(request.model or "")
        candidate = route.first
        capabilities = candidate.backend.capabilities
        warnings += check_capabilities(request, capabilities, candidate.model.id)
        context = _NO_HISTORY
        if request.previous_response_id is not None or request.conversation is not None:
            inherit_tools = self._policy.inherit_tools
            context = await self._load_history(request, project, memory, share, inherit_tools=inherit_tools)
        try:
            # Called directly for most requests: an await that does not wait costs more than the work itself.
            if is_large():
                request, left_out = await offload.run(self._select_tools, request, context, capabilities)
            else:
                request, left_out = self._select_tools(request, context, capabilities)
            if capabilities.check_schemas is not None or (not capabilities.any_tool and have_grammars(request.tools)):
                await self._check_grammars(request, capabilities, project=project)
        except AntiphonError as error:
            if context.tools:
                explain_inherited_tools(error)
            raise
        new = await self._read_input(
            request, client_input, context, candidate, project=project, repair=repair, share=share
        )
        warnings += [*left_out, *new.left_out]
        items, repairs = (context.items + new.items if context.items else new.items), list[str]()
        if repair or not new.is_plain or (context.items and not _are_messages(context.items)):
            build = partial(self._build_turn, repair=repair)
            if is_large():
                request, items, repairs = await offload.run(build, request, context, new, project)
            else:
                request, items, repairs = build(request, context, new, project)
        _apply_model_defaults(request, candidate.model)
        turn = self._make_turn(request, items, new, project)
        if new.has_media or (context.items and self._media.may_be_needed(capabilities)):
            turn, extracted = await self._media.resolve(turn, capabilities)
            warnings += extracted
        return self._make_prepared(turn, route, context, new, warnings, repairs)

    async def prepare_accepted(
        self, request: CreateRequest, accepted: Accepted, *, project: str, share: HistoryShare | None = None
    ) -> Prepared:
        """Lay out the turn of a queued request that starts.

        Its parameters, tools and input were checked when it was accepted and stay as they are. Only its context is
        loaded again, and repaired. `share` is as in `prepare`.
        """
        route = self._router.find(request.model or "")
        capabilities = route.first.backend.capabilities
        context = _NO_HISTORY
        if request.previous_response_id is not None or request.conversation is not None:
            context = await self._load_history(request, project, None, share, inherit_tools=False)
        new = _NewInput(items=accepted.input, mint=accepted.mint, has_media=has_media(accepted.input))
        build = partial(self._build_history, request, context, new, project, repair=True)
        items, repairs = await offload.run(build)
        turn = msgspec.structs.replace(
            self._make_turn(request, items, new, project),
            may_be_repeated=True,
            is_suspect=accepted.is_suspect,
        )
        warnings: list[str] = []
        if new.has_media or (context.items and self._media.may_be_needed(capabilities)):
            turn, warnings = await self._media.resolve(turn, capabilities)
        return self._make_prepared(turn, route, context, new, warnings, repairs)

    async def _load_history(
        self,
        request: CreateRequest,
        project: str,
        memory: ConnectionMemory | None,
        share: HistoryShare | None,
        *,
        inherit_tools: bool,
    ) -> History:
        return await load_history(
            request,
            project=project,
            store=self._store,
            sealer=self._sealer,
            inherit_tools=inherit_tools,
            memory=memory,
            share=share,
        )

    def _make_prepared(
        self,
        turn: Turn,
        route: ModelRoute,
        context: History,
        new: "_NewInput",
        warnings: list[str],
        repairs: list[str],
    ) -> Prepared:
        request, capabilities = turn.request, route.first.backend.capabilities
        # A shared list has neither hosted tools nor credentials.
        has_plain_tools = request.tools is None or type(request.tools) is SharedTools
        is_hosted = (request.tools is not None and self._hosted.applies_to(request.tools, capabilities)) or (
            self._hosted.run_locally and self._hosted.replaces_items(turn.items, capabilities)
        )
        # A continued compaction is expanded twice, with the same warnings.
        repairs = list(dict.fromkeys((*context.repairs, *repairs)))
        return Prepared(
            turn=turn,
            route=route,
            input=new.items,
            mint=new.mint,
            created_at=int(time.time()),
            warnings=_join_warnings(warnings, repairs, new, route.first.describe_emulation(request)),
            repairs=repairs,
            is_hosted=is_hosted,
            inherits_tools=bool(context.tools),
            shown_tools=None if has_plain_tools else self._show_tools(request.tools or [], is_hosted=is_hosted),
            has_own_ids=new.has_own_ids,
        )

    def _show_tools(self, tools: list[Tool | Unknown], *, is_hosted: bool) -> list[Tool | Unknown]:
        """Return the tools as the response repeats them."""
        if is_hosted:
            tools = self._hosted.echo_tools(tools)
        if has_credentials(tools):
            tools = [hide_credentials(tool) for tool in tools]
        return tools

    def _make_turn(self, request: CreateRequest, items: Items, new: "_NewInput", project: str) -> Turn:
        return Turn(
            request=request,
            items=items,
            project=project,
            response_id=new.mint.response_id,
            # The stream of a background response can be read at any time, from its first event.
            streamed=bool(request.stream or request.background),
            background=bool(request.background),
            grammar_limits=self._policy.grammar_limits,
            find_param=new.paths.find_param if new.paths is not None else None,
            limits=self._policy.answer_limits,
            outbound=self._policy.outbound,
            text_items=items if new.is_self_contained else None,
        )

    async def _complete_request(
        self, request: CreateRequest, project: str, memory: ConnectionMemory | None
    ) -> tuple[CreateRequest, list[str]]:
        """Return the request with its prompt template and without ignored state, and warnings."""
        ignored: list[str] = []
        if self._policy.stateless:
            request, ignored = remove_state(request, has_memory=memory is not None)
        return await self._prompts.apply_template(request, project), ignored

    def _check_request(
        self,
        request: CreateRequest,
        client_input: str | Items | None,
        memory: ConnectionMemory | None,
        *,
        may_be_empty: bool,
    ) -> None:
        check_parameters(request, client_input=client_input, on_websocket=memory is not None, may_be_empty=may_be_empty)
        check_counts(request, self._policy)

    def _select_tools(
        self, request: CreateRequest, context: History, capabilities: Capabilities
    ) -> tuple[CreateRequest, list[str]]:
        """Return the request with the tools that can be served, and warnings about the others."""
        unsupported = self._policy.unsupported_tools
        if request.tools is None and context.tools:
            request = msgspec.structs.replace(request, tools=context.tools)
            unsupported = "drop"  # inherited tools: this request did not ask for them, and another model served them
        tools, left_out = select_tools(
            request,
            capabilities=capabilities,
            unsupported=unsupported,
            functions_only=self._policy.stateless,
            history=context.items,
            hosted=self._hosted.tools,
            hosted_types=self._hosted.select_types(capabilities) if request.tools else _NO_TYPES,
        )
        request = copy_struct(request)  # from here on the request is our own and may be changed
        request.tools = tools or None
        return request, left_out

    async def _check_grammars(self, request: CreateRequest, capabilities: Capabilities, *, project: str) -> None:
        """Raise InvalidRequest if a grammar or a schema of the request cannot be compiled within the limits."""
        if not capabilities.any_tool and request.tools:
            await self._grammars.check_tools(request.tools, project=project)
        if capabilities.check_schemas is not None:
            await capabilities.check_schemas(request, self._policy.grammar_limits)

    async def _read_input(
        self,
        request: CreateRequest,
        client_input: str | Items | None,
        context: History,
        candidate: Candidate,
        *,
        project: str,
        repair: bool,
        share: HistoryShare | None,
    ) -> "_NewInput":
        """Return the new items of the request, checked and with their references filled in.

        `client_input` is the input that the client sent. The items of a prompt template come before it.
        """
        mint = BrandedMint(self._policy.id_prefix) if self._policy.id_prefix else Mint()
        sent = read_input(request, mint) if not is_large() else await offload.run(read_input, request, mint)
        is_plain = _are_messages(sent)
        paths = ParamPaths(sent, client_input)
        try:
            has_client_ids = mint.minted < len(sent)
            if has_client_ids and not repair and (request.store is not False or request.conversation is not None):
                check_unique_ids(sent)
            is_first = not context.items and not context.compacted
            is_self_contained = is_first and (is_plain or _are_self_contained(sent))
            if is_self_contained and not (await offload.run(has_media, sent) if is_large() else has_media(sent)):
                has_own_ids = mint.minted == len(sent) and not self._policy.id_prefix
                return _NewInput(
                    items=sent,
                    mint=mint,
                    paths=paths,
                    is_plain=is_plain,
                    is_self_contained=True,
                    has_own_ids=has_own_ids,
                )
            filled = await resolve_references(
                sent,
                sent=request.input if isinstance(request.input, list) else (),
                history=[*context.compacted, *context.items],  # in this order: a call id may occur twice
                project=project,
                store=self._store,
                share=share,
            )
            repeated = paths.rewrite_warnings(filled.warnings)
            paths.select(filled.items, filled.indexes)
            if not is_plain and not candidate.backend.capabilities.any_tool:
                check_approvals(filled.items, [*context.compacted, *context.items], request.tools)
            if not is_large():
                left_out, media = self._check_items(filled.items, candidate)
            else:
                left_out, media = await offload.run(self._check_items, filled.items, candidate)
            left_out = paths.rewrite_warnings(left_out)
            if not candidate.backend.capabilities.any_tool and have_tools(filled.items):
                await self._grammars.check_items(filled.items, project=project)
        except InvalidRequest as error:
            paths.rewrite_error(error)
            raise
        return _NewInput(
            items=filled.items,
            mint=mint,
            paths=paths,
            is_plain=is_plain,
            has_media=media,
            left_out=left_out,
            repeated=repeated,
        )

    def _check_items(self, items: Items, candidate: Candidate) -> tuple[list[str], bool]:
        """Raise InvalidRequest for new items that cannot be served.

        Return warnings about unknown types and the tools they bring, and True if they may have media.
        """
        capabilities = candidate.backend.capabilities
        check_trigger(items)
        media = has_media(items)
        warnings: list[str] = []
        if media:
            warnings = check_unknown_types(items, is_forwarded=capabilities.any_tool)
            check_media(items, capabilities, candidate.model.id)
            check_media_urls(items, self._policy.outbound)
        check_configuration_updates(items)
        warnings += check_item_tools(items, capabilities=capabilities, unsupported=self._policy.unsupported_tools)
        return warnings, media

    def _build_turn(
        self, request: CreateRequest, context: History, new: "_NewInput", project: str, *, repair: bool
    ) -> tuple[CreateRequest, Items, list[str]]:
        """Return the request with the updates in its history, the whole history, and warnings about repairs."""
        if new.is_self_contained and not repair:  # there is nothing to expand, to open or to apply
            has_cut_off = check_call_pairs(new.items)
            return request, *(drop_unfinished_items(new.items) if has_cut_off else (new.items, []))
        items, repairs = self._build_history(request, context, new, project, repair=repair)
        request, useless = apply_configuration_updates(request, items)
        return request, items, [*repairs, *useless]

    def _build_history(
        self, request: CreateRequest, context: History, new: "_NewInput", project: str, *, repair: bool
    ) -> tuple[Items, list[str]]:
        """Return the whole history that the model reads, and warnings about repairs."""
        expanded = expand_compactions(context.items + new.items, self._sealer, project=project)
        items, unreadable = drop_unreadable_seals(expanded.items, self._sealer, project=project)
        if repair or ends_in_trigger(items):
            items, unpaired = repair_before_trigger(items, last_response=request.previous_response_id)
        else:
            check_call_pairs(items)
            items, unpaired = drop_unfinished_items(items)
        return items, [*expanded.warnings, *unreadable, *unpaired]


class _NewInput(msgspec.Struct, frozen=True, kw_only=True):
    """The new items of a request. `left_out` and `repeated` are warnings about tools and about repeated items.

    If `is_plain`, all of the items are messages. Compactions, calls, reasoning and settings need further steps.
    If `is_self_contained`, they are the whole history, of messages, calls and outputs. If `has_media`, they may have
    images or files. If `has_own_ids`, all of their ids are from `mint`.
    """

    items: Items
    mint: Mint
    paths: ParamPaths | None = None
    is_plain: bool = False
    is_self_contained: bool = False
    has_media: bool = False
    has_own_ids: bool = False
    left_out: Sequence[str] = ()
    repeated: Sequence[str] = ()


def _are_messages(items: Items) -> bool:
    return _MESSAGE_ONLY.issuperset(map(type, items))


def _are_self_contained(items: Items) -> bool:
    return _SELF_CONTAINED.issuperset(map(type, items))


def _join_warnings(
    warnings: Sequence[str], repairs: Sequence[str], new: "_NewInput", emulation: Sequence[str]
) -> list[str]:
    # The header holds a limited number of warnings, so the most numerous kinds come last.
    return [*warnings, *(f"history: {each}" for each in repairs), *new.repeated, *emulation]


def _apply_model_defaults(request: CreateRequest, model: Model) -> None:
    if request.temperature is None:
        request.temperature = model.temperature
    if request.top_p is None:
        request.top_p = model.top_p


def read_input(request: CreateRequest, mint: Mint) -> Items:
    """Return the request's input as items that can be stored: with ids, and with messages in parts."""
    if request.input is None:
        return []
    if isinstance(request.input, str):
        return [Message("user", [InputText(request.input)], mint.new_id("msg"), "completed")]
    return normalize_items(request.input, mint)
