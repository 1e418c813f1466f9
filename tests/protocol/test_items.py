import json
from typing import Any

import pytest

from antiphon.protocol.codec import decode_items, encode
from antiphon.protocol.content import (
    ComputerScreenshot,
    InputImage,
    InputText,
    OutputText,
    ReasoningText,
    Refusal,
    SummaryText,
    Text,
)
from antiphon.protocol.hosted import ComputerCallOutput, LocalShellCallOutput
from antiphon.protocol.items import (
    ITEMS,
    CompactionTrigger,
    ConfigurationUpdate,
    CustomToolCallOutput,
    EffortUpdate,
    FunctionCall,
    FunctionCallOutput,
    ItemReference,
    Message,
    Reasoning,
)
from antiphon.protocol.unions import Unknown

EASY = Message("user", "hi")
FULL = Message("developer", [InputText("hi"), InputImage(image_url="data:,")], status="completed")
OUTPUT = Message("assistant", [OutputText("hi"), Refusal("no")], id="msg_1", status="completed", phase="final_answer")

LOOSE = [
    (b'{"role":"user","content":"hi"}', EASY),
    (b'{"type":null,"role":"user","content":"hi"}', EASY),
    (b'{"type":"message","role":"user","content":"hi","id":null,"status":null,"phase":null}', EASY),
    (b'{"role":"assistant","content":"hi","phase":"commentary"}', Message("assistant", "hi", phase="commentary")),
    (
        (
            b'{"role":"developer","status":"completed","content":[{"type":"input_text","text":"hi"},'
            b'{"type":"input_image","image_url":"data:,"}]}'
        ),
        FULL,
    ),
    (
        (
            b'{"type":"message","id":"msg_1","role":"assistant","status":"completed","phase":"final_answer","content":['
            b'{"type":"output_text","text":"hi","annotations":[]},{"type":"refusal","refusal":"no"}]}'
        ),
        OUTPUT,
    ),
    (b'{"role":"user","content":[{"type":"text","text":"hi"}]}', Message("user", [Text("hi")])),
    (b'{"role":"user","content":[]}', Message("user", [])),
    (b'{"id":"msg_1"}', ItemReference("msg_1")),
    (b'{"type":null,"id":"msg_1"}', ItemReference("msg_1")),
    (b'{"type":"item_reference","id":"msg_1"}', ItemReference("msg_1")),
    (b'{"type":"function_call_output","call_id":"c","output":"1"}', FunctionCallOutput("1", "c")),
    (
        b'{"type":"function_call_output","call_id":"c","output":[{"type":"input_text","text":"1"}]}',
        FunctionCallOutput([InputText("1")], "c"),
    ),
    (b'{"type":"function_call_output","name":"f","output":"1"}', FunctionCallOutput("1", name="f")),
    (b'{"type":"reasoning","id":"rs_1","summary":[]}', Reasoning(id="rs_1")),
    *(
        (
            b'{"type":"computer_call_output","call_id":"c","output":{%b"image_url":"data:,","detail":"high"}}' % kind,
            ComputerCallOutput("c", ComputerScreenshot(image_url="data:,", detail="high")),
        )
        for kind in (b'"type":"computer_screenshot",', b'"type":"input_image",', b"")
    ),
    (
        (
            b'{"type":"reasoning","id":"rs_1","summary":[{"type":"summary_text","text":"s"}],"encrypted_content":"e",'
            b'"content":[{"type":"reasoning_text","text":"r"}]}'
        ),
        Reasoning([SummaryText("s")], "rs_1", [ReasoningText("r")], "e"),
    ),
    (b'{"type":"reasoning","summary":[],"content":null,"encrypted_content":null,"status":null}', Reasoning()),
    (b'{"type":"compaction_trigger"}', CompactionTrigger()),
    (
        b'{"type":"configuration_update","reasoning":{"effort":"low"}}',
        ConfigurationUpdate(reasoning=EffortUpdate("low")),
    ),
]


@pytest.mark.parametrize(("raw", "item"), LOOSE)
def test_item_is_decoded_in_every_form(raw: bytes, item: Any) -> None:
    assert ITEMS.decode(raw) == item


def test_input_may_mix_all_item_forms() -> None:
    assert decode_items(b"[%b]" % b",".join(raw for raw, _ in LOOSE)) == [item for _, item in LOOSE]


@pytest.mark.parametrize(
    ("item", "raw"),
    [
        (EASY, b'{"type":"message","role":"user","content":"hi"}'),
        (
            OUTPUT,
            (
                b'{"type":"message","role":"assistant","content":[{"type":"output_text","text":"hi","annotations":[]},'
                b'{"type":"refusal","refusal":"no"}],"id":"msg_1","status":"completed","phase":"final_answer"}'
            ),
        ),
        (Reasoning(id="rs_1"), b'{"type":"reasoning","summary":[],"id":"rs_1"}'),
        (
            FunctionCall("c", "f", "{}", async_=True),
            b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}","async":true}',
        ),
        (
            CustomToolCallOutput("c", [Unknown(b'{"type": "acme:x"}')]),
            b'{"type":"custom_tool_call_output","call_id":"c","output":[{"type": "acme:x"}]}',
        ),
    ],
)
def test_unset_fields_are_omitted(item: Any, raw: bytes) -> None:
    assert encode(item) == raw


def test_item_has_type_property() -> None:
    assert [item.type for item in (EASY, Reasoning(), ItemReference("x"))] == ["message", "reasoning", "item_reference"]


def test_arguments_are_not_reformatted() -> None:
    arguments = '{ "a" : 1.0,\n"b":"\\u00e9" }'
    raw = encode(FunctionCall("c", "f", arguments))
    [call] = decode_items(b"[%b]" % raw)
    assert isinstance(call, FunctionCall)
    assert call.arguments == arguments


@pytest.mark.parametrize("item_id", ["", "lsho_1", "call_1"])
def test_local_shell_output_may_have_call_id(item_id: str) -> None:
    sent = {"type": "local_shell_call_output", "call_id": "call_1", "output": "a", "status": "completed"}
    named = ITEMS.decode(encode(sent | ({"id": item_id} if item_id else {})))
    assert named == LocalShellCallOutput(item_id, "a", "completed", "call_1")
    assert isinstance(named, LocalShellCallOutput)
    assert named.call_id == "call_1"
    # An unknown item in the list makes the decoder decode each element separately.
    assert ITEMS.decode_list(encode([{"type": "acme:x"}, json.loads(encode(named))]))[1] == named


def test_local_shell_output_without_call_id_uses_its_id() -> None:
    plain = {"type": "local_shell_call_output", "id": "call_1", "output": "a"}
    item = ITEMS.decode(encode(plain))
    assert isinstance(item, LocalShellCallOutput)
    assert (item.call_id, json.loads(encode(item))) == ("call_1", plain)
