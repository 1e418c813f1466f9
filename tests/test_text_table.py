"""Tables of text: the columns of a terminal that characters take."""

import pytest

from antiphon.text_table import cut_text, format_table, measure_table, measure_text, pad_text, shorten_text


@pytest.mark.parametrize(
    ("text", "columns"),
    [("", 0), ("model", 5), ("ünï", 3), ("u\u0308", 1), ("模型", 4), ("ﾓﾃﾞﾙ", 4), ("🙂", 2), ("a\u200db", 2)],
)
def test_width_is_that_on_a_terminal(text: str, columns: int) -> None:
    assert measure_text(text) == columns
    assert pad_text(text, 6) == text + " " * (6 - columns)


@pytest.mark.parametrize(
    ("text", "width", "cut", "shortened"),
    [
        ("model", 5, "model", "model"),
        ("model", 4, "mode", "mod…"),
        ("模型名", 6, "模型名", "模型名"),
        ("模型名", 5, "模型", "模型…"),
        ("模型名", 4, "模型", "模…"),
        ("u\u0308u\u0308u\u0308", 2, "u\u0308u\u0308", "u\u0308…"),
    ],
)
def test_long_text_is_cut_to_the_width(text: str, width: int, cut: str, shortened: str) -> None:
    assert (cut_text(text, width), shorten_text(text, width)) == (cut, shortened)


def test_columns_with_wide_characters_are_aligned() -> None:
    rows = [["NAME", "TOKENS", "STATE"], ["模型名", "1", ""], ["u\u0308", "10", "new"]]
    assert format_table(rows, right=[1]) == [
        "NAME    TOKENS  STATE",
        "模型名       1",
        "u\u0308           10  new",
    ]
    assert measure_table(rows) == 21
    assert format_table([]) == []
