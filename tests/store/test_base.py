"""Rules for all methods of all stores. The `store_url` fixture in conftest.py lists the stores."""

import inspect
from collections.abc import Callable

import pytest

from antiphon.errors import Unavailable
from antiphon.protocol.conversation import Conversation
from antiphon.store.base import Store, StoredResponse
from antiphon.store.keys import StoredKey
from antiphon.store.location import locate_store
from antiphon.store.usage import StoredProject

MakeStored = Callable[..., StoredResponse]

CALLS = {
    "save": lambda store, stored: store.save("p", stored),
    "list_input_items": lambda store, _: store.list_input_items("p", "resp_1", after=None, limit=1, order="asc"),
    "load": lambda store, _: store.load("p", "resp_1"),
    "load_response": lambda store, _: store.load_response("p", "resp_1"),
    "load_bare_response": lambda store, _: store.load_bare_response("p", "resp_1"),
    "delete": lambda store, _: store.delete("p", "resp_1"),
    "load_chain": lambda store, _: store.load_chain("p", "resp_1"),
    "expire": lambda store, _: store.expire(1),
    "create_conversation": lambda store, _: store.create_conversation("p", Conversation("conv_1", 1), []),
    "load_conversation": lambda store, _: store.load_conversation("p", "conv_1"),
    "update_conversation": lambda store, _: store.update_conversation("p", "conv_1", None),
    "delete_conversation": lambda store, _: store.delete_conversation("p", "conv_1"),
    "append_items": lambda store, _: store.append_items("p", "conv_1", []),
    "list_items": lambda store, _: store.list_items("p", "conv_1", after=None, limit=1, order="asc"),
    "load_conversation_items": lambda store, _: store.load_conversation_items("p", "conv_1"),
    "load_item": lambda store, _: store.load_item("p", "conv_1", "msg_1"),
    "delete_item": lambda store, _: store.delete_item("p", "conv_1", "msg_1"),
    "load_outputs": lambda store, _: store.load_outputs("p", ["resp_1"]),
    "load_items": lambda store, _: store.load_items("p", ["msg_1"]),
    "find_item": lambda store, _: store.find_item("p", "msg_1"),
    "append_events": lambda store, _: store.append_events("p", "resp_1", 0, [b"{}"]),
    "read_events": lambda store, _: store.read_events("p", "resp_1", -1),
    "search_events": lambda store, _: store.search_events("p", "resp_1", b"x", start=-1),
    "drop_events": lambda store, _: store.drop_events("p", "resp_1"),
    "enqueue": lambda store, stored: store.enqueue("p", stored, b"{}"),
    "claim": lambda store, _: store.claim("us", as_of=0, lease=1, limit=1),
    "renew": lambda store, _: store.renew("us", lease=1),
    "release": lambda store, _: store.release("us"),
    "end_leases": lambda store, _: store.end_leases("us"),
    "return_run": lambda store, _: store.return_run("us", "p", "resp_1", free_since=0),
    "stop_renewing": lambda store, _: store.stop_renewing("us", "p", "resp_1"),
    "withdraw_interruption": lambda store, _: store.withdraw_interruption("p", "resp_1", attempt=1),
    "mark_watched": lambda store, _: store.mark_watched("p", "resp_1"),
    "request_cancel": lambda store, _: store.request_cancel("p", "resp_1"),
    "count_waiting": lambda store, _: store.count_waiting(),
    "save_prompt": lambda store, _: store.save_prompt("p", "pmpt_1", "1", b"{}", 1),
    "load_prompt": lambda store, _: store.load_prompt("p", "pmpt_1", None),
    "list_prompts": lambda store, _: store.list_prompts("p"),
    "shrink": lambda store, _: store.shrink(),
    "check": lambda store, _: store.check(),
    "append_hosted_steps": lambda store, _: store.append_hosted_steps("p", "resp_1", 0, [b"{}"], owner="us"),
    "load_hosted_steps": lambda store, _: store.load_hosted_steps("p", "resp_1"),
    "claim_effect": lambda store, _: store.claim_effect("p", "key"),
    "save_key": lambda store, _: store.save_key(StoredKey("key_1", b"d", "p", "", ("read",), 1)),
    "find_key": lambda store, _: store.find_key(b"d"),
    "list_keys": lambda store, _: store.list_keys(),
    "has_keys": lambda store, _: store.has_keys(),
    "revoke_key": lambda store, _: store.revoke_key("key_1", 1),
    "rotate_key": lambda store, _: store.rotate_key("key_1", b"e", None),
    "record_key_use": lambda store, _: store.record_key_use("key_1", 1, interval=60),
    "delete_prompt": lambda store, _: store.delete_prompt("p", "pmpt_1"),
    "add_usage": lambda store, _: store.add_usage([], write_id="1"),
    "list_usage": lambda store, _: store.list_usage(0, 60, width=60),
    "read_spending": lambda store, _: store.read_spending(0),
    "roll_up_usage": lambda store, _: store.roll_up_usage(60),
    "report_limit_counts": lambda store, _: store.report_limit_counts("us", []),
    "list_limit_counts": lambda store, _: store.list_limit_counts("us"),
    "measure_stored_bytes": lambda store, _: store.measure_stored_bytes("p"),
    "save_project": lambda store, _: store.save_project(StoredProject("p", "P", 1)),
    "list_projects": lambda store, _: store.list_projects(),
    "archive_project": lambda store, _: store.archive_project(StoredProject("p", "P", 1)),
}


def test_every_method_of_the_protocol_is_tested() -> None:
    # `announce` waits for nothing, and reports nothing before `open`.
    methods = {name for name, _ in inspect.getmembers(Store, inspect.isfunction) if not name.startswith("_")}
    assert set(CALLS) == methods - {"open", "close", "announce"}


@pytest.mark.parametrize("method", CALLS)
async def test_method_raises_unavailable_before_open(store_url: str, method: str, make_stored: MakeStored) -> None:
    with pytest.raises(Unavailable, match="The store is not open"):
        await CALLS[method](locate_store(store_url), make_stored("resp_1"))


@pytest.mark.parametrize("method", CALLS)
async def test_method_raises_unavailable_after_close(store: Store, method: str, make_stored: MakeStored) -> None:
    await store.close()
    with pytest.raises(Unavailable, match="The store is not open"):
        await CALLS[method](store, make_stored("resp_1"))


async def test_store_can_be_closed_twice_or_unopened(store: Store, store_url: str) -> None:
    await store.close()
    await store.close()
    await locate_store(store_url).close()
