"""The stored form of items, and checks of their ids."""

import pytest

from antiphon.engine.items import check_item_ids, normalize_item
from antiphon.engine.respond.ids import Mint
from antiphon.errors import InvalidRequest
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.hosted import LocalShellCallOutput, ToolSearchCall, ToolSearchOutput
from antiphon.protocol.items import FunctionCallOutput, Item, ItemReference, Message
from antiphon.protocol.unions import Unknown


@pytest.mark.parametrize(
    ("item", "stored"),
    [
        (Message("user", "hi"), Message("user", [InputText("hi")], "msg_t0000", "completed")),
        (Message("assistant", "hi"), Message("assistant", [OutputText("hi")], "msg_t0000", "completed")),
        (FunctionCallOutput("x", "c"), FunctionCallOutput("x", "c", id="fco_t0000", status="completed")),
        (LocalShellCallOutput("c", "x"), LocalShellCallOutput("lsho_t0000", "x", "completed", "c")),
        (LocalShellCallOutput("c", "x", None, "c"), LocalShellCallOutput("lsho_t0000", "x", "completed", "c")),
        (LocalShellCallOutput("", "x", None, "c"), LocalShellCallOutput("lsho_t0000", "x", "completed", "c")),
        (LocalShellCallOutput("mine", "x", None, "c"), LocalShellCallOutput("mine", "x", "completed", "c")),
        (ToolSearchCall({}, "tsc_1", "c", "server"), ToolSearchCall({}, "tsc_1", None, "server", "completed")),
        (ToolSearchCall({}, "tsc_1", "c", "client"), ToolSearchCall({}, "tsc_1", "c", "client", "completed")),
        (ToolSearchCall({}, "tsc_1", "c"), ToolSearchCall({}, "tsc_1", "c", None, "completed")),
        (ToolSearchOutput([], "tso_1", "c", "server"), ToolSearchOutput([], "tso_1", None, "server", "completed")),
        (Message("user", "hi", ""), Message("user", [InputText("hi")], "msg_t0000", "completed")),
        (Unknown(b'{"type":"acme:x","id":""}'), Unknown(b'{"type":"acme:x","id":"item_t0000"}')),
        (Unknown(b'{"type":"acme:x","v":1.0}'), Unknown(b'{"type":"acme:x","v":1.0,"id":"item_t0000"}')),
        (Unknown(b'{"id":null,"type":"acme:x"}'), Unknown(b'{"id":"item_t0000","type":"acme:x"}')),
        (Unknown(b'{"type": "acme:x", "id": "mine"}'), Unknown(b'{"type": "acme:x", "id": "mine"}')),
    ],
)
def test_item_is_stored_with_an_id_and_unchanged_content(item: Item | Unknown, stored: Item | Unknown) -> None:
    assert normalize_item(item, Mint("t")) == stored


@pytest.mark.parametrize("item_id", [b"5", b"1.5", b"true", b"{}", b"[1]"])
def test_id_that_is_not_a_string_is_refused_with_its_path(item_id: bytes) -> None:
    named, wrong = Unknown(b'{"type":"acme:x","id":"a"}'), Unknown(b'{"type":"acme:x","id":%b}' % item_id)
    with pytest.raises(InvalidRequest) as caught:
        check_item_ids([Message("user", "hi"), named, wrong], param="items")
    assert (caught.value.param, caught.value.code, caught.value.status) == ("items[2].id", "invalid_type", 400)
    assert caught.value.message.startswith("Invalid value for 'items[2].id': Expected `str | null`, got ")


def test_reference_without_an_id_is_refused_with_its_path() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_item_ids([ItemReference("msg_1"), ItemReference("")])
    assert (caught.value.message, caught.value.param, caught.value.code) == (
        "Invalid value for 'input[1].id': it is empty.",
        "input[1].id",
        "invalid_value",
    )


@pytest.mark.parametrize("item_id", [b"", b',"id":null', b',"id":""', b',"id":"a/b"'])
def test_item_id_is_optional(item_id: bytes) -> None:
    check_item_ids([Message("user", "hi", ""), Unknown(b'{"type":"acme:x"%b}' % item_id), ItemReference("msg_1")])
