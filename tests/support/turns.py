"""Hypothesis strategies for the deltas of a turn."""

import itertools

from hypothesis import strategies as st

from antiphon.protocol import content, items
from antiphon.protocol.hosted import ShellAction, ShellCall
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d

words = st.text(max_size=6)
keys = st.integers(0, 3)
texts = st.one_of(
    st.builds(d.Text, words),
    st.builds(d.Text, words, st.just((content.LogProb("x", -1.0, [120]),))),
    st.builds(d.Refusal, words),
    st.builds(d.Annotate, st.just(content.FilePath("file_1", 0)) | st.just(Unknown(b'{"type":"acme:note"}'))),
    st.builds(d.Reasoning, words),
    st.builds(d.ReasoningSummary, words, st.integers(0, 2)),
    st.builds(d.ReasoningSeal, words),
)
calls = st.one_of(
    st.builds(d.ToolCall, keys, words, st.sampled_from(["", "f", "g"]), st.none() | st.just("call_x")),
    st.builds(d.CustomToolCall, keys.map(lambda key: f"custom {key}"), words, st.sampled_from(["", "h"])),
)
others = st.one_of(
    st.builds(d.TokenUsage, st.just(Usage(1, 2, 3))),
    st.builds(d.WholeItem, st.just(Unknown(b'{"type":"acme:x","id":"x_1"}'))),
    st.builds(d.WholeItem, st.sampled_from([items.Compaction("blob", "cmp_1"), items.Compaction("blob")])),
    st.builds(d.WholeItem, st.just(ShellCall("call_x", ShellAction(["ls"]), status="completed"))),
    st.builds(d.Passthrough, st.just(Unknown(b'{"type":"acme.tick","sequence_number":5}'))),
)
_search = items.WebSearchCall("ws_up", {"type": "search"}, "completed")
_searching = Unknown(b'{"type":"response.web_search_call.searching","item_id":"ws_up","output_index":7}')


def _make_hosted_item(key: str) -> list[d.Delta]:
    """Return the deltas of a hosted tool's item."""
    begun = Unknown(b'{"type":"web_search_call","id":"ws_up","status":"in_progress"}')
    return [d.OpenItem(key, begun, "ws"), d.ItemPassthrough(_searching, key), d.CloseItem(key, _search)]


hosted_items = st.uuids().map(str).map(_make_hosted_item)
borders = st.one_of(
    st.builds(d.Phase, st.sampled_from(["commentary", "final_answer"])),
    st.just(d.CloseItem()),
    st.builds(d.CloseItem, keys),
    st.just(d.ItemPassthrough(Unknown(b'{"type":"acme.glow","item_id":"msg_up","output_index":7}'))),
)
endings = st.one_of(
    st.builds(d.Finish, st.sampled_from(["stop", "length", "content_filter", "cancelled"])), st.builds(d.Failure, words)
)
_chunks = (texts | calls | others | borders).map(lambda delta: [delta]) | hosted_items
turns = st.tuples(st.lists(_chunks, max_size=30), endings).map(lambda turn: [*itertools.chain(*turn[0]), turn[1]])
