"""All stores return the same results for any sequence of calls."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import AntiphonError
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Message
from antiphon.protocol.request import ConversationRef
from antiphon.protocol.response import Response
from antiphon.protocol.tools import FunctionTool
from antiphon.store.base import Store, StoredResponse
from antiphon.store.limits import RunLimits
from antiphon.store.location import locate_store
from support.postgres_server import EmptySchema

Call = tuple[str, Callable[[Store], Awaitable[Any]]]

projects = st.sampled_from(["p", "q"])
response_ids = st.sampled_from(["resp_1", "resp_2", "resp_3"])
conversation_ids = st.sampled_from(["conv_1", "conv_2"])
item_ids = st.sampled_from(["msg_1", "msg_2", "msg_3", "msg_4"])
owners = st.sampled_from(["us", "them"])
numbers = st.integers(0, 6)
times = st.sampled_from([10, 20, 30])
item_lists = st.lists(item_ids, max_size=3).map(lambda ids: [Message("user", item_id, item_id) for item_id in ids])
event_lists = st.lists(st.sampled_from([b"1", b'"two"', b"{}"]), max_size=3)
responses = st.builds(
    lambda response_id, previous, status, conversation, items, expires_at, tools: StoredResponse(
        response=Response(
            id=response_id,
            created_at=1,
            model="m",
            status=status,
            previous_response_id=previous,
            conversation=conversation and ConversationRef(conversation),
            output=items,
            tools=tools,
        ),
        input=[],
        expires_at=expires_at,
    ),
    response_ids,
    st.none() | response_ids,
    st.sampled_from(["queued", "in_progress", "completed", "cancelled"]),
    st.none() | conversation_ids,
    item_lists,
    st.none() | times,
    st.lists(st.just(FunctionTool("f")), max_size=1),
)


def call(name: str, *arguments: st.SearchStrategy[Any], **options: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    def bind(arguments: tuple[Any, ...], options: dict[str, Any]) -> Call:
        return f"{name}{arguments}{options}", lambda store: getattr(store, name)(*arguments, **options)

    return st.builds(bind, st.tuples(*arguments), st.fixed_dictionaries(options))


calls = st.one_of(
    call("save", projects, responses),
    call(
        "save",
        projects,
        responses,
        conversation=st.none() | conversation_ids,
        owner=st.none() | owners,
        events=st.none() | st.tuples(numbers, event_lists),
    ),
    call("load", projects, response_ids),
    call("delete", projects, response_ids),
    call("load_chain", projects, response_ids, with_tools=st.booleans()),
    call("expire", times),
    call(
        "create_conversation",
        projects,
        st.builds(Conversation, conversation_ids, st.just(1)),
        item_lists,
        expires_at=st.none() | times,
    ),
    call("update_conversation", projects, conversation_ids, st.none() | st.just({"a": "b"})),
    call("delete_conversation", projects, conversation_ids),
    call("append_items", projects, conversation_ids, item_lists, answer=st.none() | item_lists),
    call(
        "list_items",
        projects,
        conversation_ids,
        after=st.none() | item_ids,
        limit=st.integers(1, 4),
        order=st.sampled_from(["asc", "desc"]),
    ),
    call("load_conversation_items", projects, conversation_ids, before=st.none() | response_ids),
    call("delete_item", projects, conversation_ids, item_ids),
    call("find_item", projects, item_ids),
    call("load_items", projects, st.lists(item_ids, max_size=4)),
    call(
        "list_input_items",
        projects,
        response_ids,
        after=st.none() | item_ids,
        limit=st.integers(1, 4),
        order=st.sampled_from(["asc", "desc"]),
    ),
    call("append_events", projects, response_ids, numbers, event_lists, owner=st.none() | owners),
    call("read_events", projects, response_ids, st.integers(-1, 6), max_bytes=st.none() | st.integers(1, 12)),
    call("load_response", projects, response_ids),
    call("load_bare_response", projects, response_ids),
    call("drop_events", projects, response_ids, owner=st.none() | owners),
    call("enqueue", projects, responses.filter(lambda stored: stored.response.status == "queued"), st.just(b"{}")),
    call(
        "claim",
        owners,
        as_of=times,
        lease=st.sampled_from([5, 10]),
        limit=st.integers(0, 2),
        limits=st.builds(RunLimits, *[st.none() | st.integers(1, 3)] * 3),
    ),
    call("renew", owners, lease=st.sampled_from([5, 10])),
    call("release", owners),
    call("return_run", owners, projects, response_ids, free_since=times),
    call("stop_renewing", owners, projects, response_ids),
    call("withdraw_interruption", projects, response_ids, attempt=st.integers(0, 2)),
    call("mark_watched", projects, response_ids),
    call("request_cancel", projects, response_ids),
)


async def run_calls(url: str, sequence: list[Call]) -> list[tuple[str, object]]:
    store = locate_store(url, now=lambda: 15)
    await store.open()
    results: list[tuple[str, object]] = []
    for name, function in sequence:
        try:
            results.append((name, await function(store)))
        except AntiphonError as error:
            results.append((name, (type(error), error.param)))
    await store.close()
    return results


@given(st.lists(calls, min_size=1, max_size=40))
def test_every_store_returns_the_same_results(sequence: list[Call]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(run_calls("memory:", sequence)) == asyncio.run(
            run_calls(f"sqlite:///{folder}/store.db", sequence)
        )


def test_postgresql_store_returns_the_same_results(postgres_schema: EmptySchema) -> None:
    @settings(max_examples=20)
    @given(st.lists(calls, min_size=1, max_size=40))
    def compare(sequence: list[Call]) -> None:
        expected = asyncio.run(run_calls("memory:", sequence))
        try:
            assert asyncio.run(run_calls(postgres_schema.url, sequence)) == expected
        finally:
            postgres_schema.clear()

    compare()
