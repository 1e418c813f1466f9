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
from antiphon.engine.prepare.toolset import check_item_tools, select_tools
from antiphon.engine.prompts import Prompts
from antiphon.engine.respond.ids import BrandedMint, Mint
from antiphon.engine.respond.session import ConnectionMemory
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
from antiphon.errors import InvalidRequest
from antiphon.offload import is_large
from antiphon.protocol.content import InputText
from antiphon.protocol.items import Item, Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tool_lists import SharedTools
from antiphon.protocol.tools import Tool, has_credentials, hide_credentials
from antiphon.protocol.unions import Unknown, copy_struct
from antiphon.store.base import Store
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS
from antiphon.upstream.media_urls import check_media_urls, has_media

Items = list[Item | Unknown]

_MESSAGE_ONLY = frozenset({Message})
_NO_TYPES: frozenset[str] = frozenset()


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request made ready for the model.

    `turn` is the model call and `route` the candidates for it. `input` are the new items to store. `warnings` are for
    the client; `repairs` are those among them that concern the history. `is_hosted`: the request has tools that this
    server runs. `shown_tools` are the tools as the response shows them, if they differ from the request's.
    """

    turn: Turn
    route: ModelRoute
    input: Items
    mint: Mint
    created_at: int
    warnings: Sequence[str]
    repairs: Sequence[str]
    is_hosted: bool = False
    shown_tools: list[Tool | Unknown] | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a queued request that were fixed when it was accepted.

    `is_suspect`: the process of an earlier attempt has died.
    """

    response_id: str
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
        session: ConnectionMemory | None = None,
        repair: bool = False,
        accepted: Accepted | None = None,
    ) -> Prepared:
        """Check the request, load the context it continues, and lay out the turn.

        With `repair`, calls and outputs of the input that do not match are repaired like those in the store instead of
        refused. `accepted` is given for a queued request that starts. Its parameters, tools and input were checked when
        it was accepted and stay as they are; only its context is loaded again.
        """
        warnings: list[str] = []
        client_input = request.input
        if accepted is None:
            request, warnings = await self._complete_request(request, project, session, may_be_empty=repair)
        route = self._router.find(request.model or "")
        candidate = route.first
        if accepted is None:
            warnings += check_capabilities(request, candidate.backend.capabilities, candidate.model.id)
        context = await load_history(
            request,
            project=project,
            store=self._store,
            sealer=self._sealer,
            inherit_tools=self._policy.inherit_tools and accepted is None,
            session=session,
        )
        if accepted is None:
            capabilities = candidate.backend.capabilities
            # Called directly for most requests: an await that does not wait costs more than the work itself.
            if is_large():
                request, left_out = await offload.run(self._select_tools, request, context, capabilities)
            else:
                request, left_out = self._select_tools(request, context, capabilities)
            is_checked = not capabilities.any_tool and have_grammars(request.tools)
            if is_checked or capabilities.check_schemas is not None:
                await self._check_grammars(request, capabilities, project=project)
            new = await self._read_input(request, client_input, context, candidate, project=project, repair=repair)
            warnings += [*left_out, *new.left_out]
        else:
            new = _NewInput(items=accepted.input, mint=accepted.mint, has_media=has_media(accepted.input))
        items, repairs = context.items + new.items, list[str]()
        if repair or not new.is_plain or not _are_messages(context.items):
            build = partial(self._build_turn, repair=repair or accepted is not None, is_new=accepted is None)
            if is_large():
                request, items, repairs = await offload.run(build, request, context, new, project)
            else:
                request, items, repairs = build(request, context, new, project)
        if accepted is None:
            _apply_model_defaults(request, candidate.model)
        # A shared list has neither hosted tools nor credentials.
        has_plain_tools = request.tools is None or type(request.tools) is SharedTools
        is_hosted = (
            request.tools is not None and self._hosted.applies_to(request.tools, candidate.backend.capabilities)
        ) or (self._hosted.run_locally and self._hosted.replaces_items(items, candidate.backend.capabilities))
        # A continued compaction is expanded twice, with the same warnings.
        repairs = list(dict.fromkeys((*context.repairs, *repairs)))
        turn = self._make_turn(request, items, new, project=project, accepted=accepted)
        if new.has_media or (context.items and self._media.may_be_needed(candidate.backend.capabilities)):
            turn, extracted = await self._media.resolve(turn, candidate.backend.capabilities)
            warnings += extracted
        return Prepared(
            turn=turn,
            route=route,
            input=new.items,
            mint=new.mint,
            created_at=int(time.time()),
            warnings=_join_warnings(warnings, repairs, new, candidate.describe_emulation(request)),
            repairs=repairs,
            is_hosted=is_hosted,
            shown_tools=None if has_plain_tools else self._show_tools(request.tools or [], is_hosted=is_hosted),
        )

    def _show_tools(self, tools: list[Tool | Unknown], *, is_hosted: bool) -> list[Tool | Unknown]:
        """Return the tools as the response repeats them."""
        if is_hosted:
            tools = self._hosted.echo_tools(tools)
        if has_credentials(tools):
            tools = [hide_credentials(tool) for tool in tools]
        return tools

    def _make_turn(
        self, request: CreateRequest, items: Items, new: "_NewInput", *, project: str, accepted: Accepted | None
    ) -> Turn:
        return Turn(
            request=request,
            items=items,
            project=project,
            response_id=accepted.response_id if accepted is not None else "",
            # The stream of a background response can be read at any time, from its first event.
            streamed=bool(request.stream or request.background),
            background=bool(request.background),
            grammar_limits=self._policy.grammar_limits,
            is_suspect=accepted is not None and accepted.is_suspect,
            find_param=new.paths.find_param if new.paths is not None else None,
            limits=self._policy.answer_limits,
            outbound=self._policy.outbound,
        )

    async def _complete_request(
        self, request: CreateRequest, project: str, session: ConnectionMemory | None, *, may_be_empty: bool
    ) -> tuple[CreateRequest, list[str]]:
        """Return the request with its prompt template and without ignored state, and warnings. Check its parameters."""
        ignored: list[str] = []
        client_input = request.input
        if self._policy.stateless:
            request, ignored = remove_state(request, has_session=session is not None)
        request = await self._prompts.apply_template(request, project)
        check_parameters(
            request, client_input=client_input, on_websocket=session is not None, may_be_empty=may_be_empty
        )
        check_counts(request, self._policy)
        return request, ignored

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
    ) -> "_NewInput":
        """Return the new items of the request, checked and with their references filled in.

        `client_input` is the input that the client sent. The items of a prompt template come before it.
        """
        mint = BrandedMint(self._policy.id_prefix) if self._policy.id_prefix else Mint()
        sent = read_input(request, mint) if not is_large() else await offload.run(read_input, request, mint)
        is_plain = _are_messages(sent)
        paths = ParamPaths(sent, client_input)
        try:
            if not repair and (request.store is not False or request.conversation is not None):
                check_unique_ids(sent)
            is_first = not context.items and not context.compacted
            if is_plain and is_first and not (await offload.run(has_media, sent) if is_large() else has_media(sent)):
                return _NewInput(items=sent, mint=mint, paths=paths, is_plain=True)
            filled = await resolve_references(
                sent,
                sent=request.input if isinstance(request.input, list) else (),
                history=[*context.compacted, *context.items],  # in this order: a call id may occur twice
                project=project,
                store=self._store,
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

        Return warnings about the tools they bring, and True if they may have media.
        """
        capabilities = candidate.backend.capabilities
        check_trigger(items)
        media = has_media(items)
        if media:
            check_media(items, capabilities, candidate.model.id)
            check_media_urls(items, self._policy.outbound)
        check_configuration_updates(items)
        left_out = check_item_tools(items, capabilities=capabilities, unsupported=self._policy.unsupported_tools)
        return left_out, media

    def _build_turn(
        self, request: CreateRequest, context: History, new: "_NewInput", project: str, *, repair: bool, is_new: bool
    ) -> tuple[CreateRequest, Items, list[str]]:
        """Return the request with the updates in its history, the whole history, and warnings about repairs."""
        items, repairs = self._build_history(context, new, project, repair=repair)
        if is_new:
            request, useless = apply_configuration_updates(request, items)
            repairs += useless
        return request, items, repairs

    def _build_history(
        self, context: History, new: "_NewInput", project: str, *, repair: bool
    ) -> tuple[Items, list[str]]:
        """Return the whole history that the model reads, and warnings about repairs."""
        expanded = expand_compactions(context.items + new.items, self._sealer, project=project)
        items, unreadable = drop_unreadable_seals(expanded.items, self._sealer, project=project)
        if repair or ends_in_trigger(items):
            items, unpaired = repair_before_trigger(items)
        else:
            check_call_pairs(items)
            items, unpaired = drop_unfinished_items(items)
        return items, [*expanded.warnings, *unreadable, *unpaired]


class _NewInput(msgspec.Struct, frozen=True, kw_only=True):
    """The new items of a request. `left_out` and `repeated` are warnings about tools and about repeated items.

    If `is_plain`, all of the items are messages. Compactions, calls, reasoning and settings need further steps.
    If `has_media`, they may have images or files.
    """

    items: Items
    mint: Mint
    paths: ParamPaths | None = None
    is_plain: bool = False
    has_media: bool = False
    left_out: Sequence[str] = ()
    repeated: Sequence[str] = ()


def _are_messages(items: Items) -> bool:
    return _MESSAGE_ONLY.issuperset(map(type, items))


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
