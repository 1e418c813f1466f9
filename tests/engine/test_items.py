"""Items on their way into the store."""

import pytest

from antiphon.engine.ids import Mint
from antiphon.engine.items import identify
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.hosted import LocalShellCallOutput
from antiphon.protocol.items import FunctionCallOutput, Item, Message
from antiphon.protocol.open import Unknown


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
        (Message("user", "hi", ""), Message("user", [InputText("hi")], "msg_t0000", "completed")),
        (Unknown(b'{"type":"acme:x","id":""}'), Unknown(b'{"type":"acme:x","id":"item_t0000"}')),
        (Unknown(b'{"type":"acme:x","v":1.0}'), Unknown(b'{"type":"acme:x","v":1.0,"id":"item_t0000"}')),
        (Unknown(b'{"id":null,"type":"acme:x"}'), Unknown(b'{"id":"item_t0000","type":"acme:x"}')),
        (Unknown(b'{"type": "acme:x", "id": "mine"}'), Unknown(b'{"type": "acme:x", "id": "mine"}')),
    ],
)
def test_an_item_is_stored_with_an_id_and_otherwise_as_it_came(item: Item | Unknown, stored: Item | Unknown) -> None:
    assert identify(item, Mint("t")) == stored
