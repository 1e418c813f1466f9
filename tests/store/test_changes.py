"""Announcements as text. Nodes of other versions read and write it: do not change the text of a kind."""

import pytest

from antiphon.store.changes import (
    Announcement,
    AttemptBegun,
    CancelRequested,
    EventsAppended,
    ResponseDeleted,
    ResponseFollowed,
    ResponseSaved,
    RunsQueued,
    decode_announcement,
    encode_announcement,
)


@pytest.mark.parametrize(
    ("announcement", "text"),
    [
        (RunsQueued(), "queued"),
        (CancelRequested("resp_1"), "cancelled resp_1"),
        (EventsAppended("resp_1", 12), "events resp_1 12"),
        (ResponseSaved("resp_1"), "events resp_1"),
        (ResponseDeleted("resp_1"), "deleted resp_1"),
        (ResponseFollowed("resp_1"), "follow resp_1"),
        (AttemptBegun("resp_1"), "begun resp_1"),
    ],
)
def test_announcement_has_the_text_of_all_versions(announcement: Announcement, text: str) -> None:
    assert encode_announcement(announcement) == text
    assert decode_announcement(text) == announcement


@pytest.mark.parametrize(
    ("text", "announcement"),
    [
        ("queued ", RunsQueued()),  # as earlier versions write it
        ("events 12", ResponseSaved("12")),
        ("events resp_1 x", ResponseSaved("resp_1 x")),
        ("new_kind resp_1", None),
        ("", None),
    ],
)
def test_text_of_another_version_is_read_or_ignored(text: str, announcement: Announcement | None) -> None:
    assert decode_announcement(text) == announcement
