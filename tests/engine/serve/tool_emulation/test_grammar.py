"""Texts matched against grammars of custom tools and patterns of schemas."""

import pytest

from antiphon.engine.serve.tool_emulation.grammar import explain_mismatch, matches_pattern
from antiphon.protocol.tools import GrammarInput

# The grammar that Codex sends with its `apply_patch`.
APPLY_PATCH = GrammarInput(
    """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
""",
    "lark",
)


@pytest.mark.parametrize(
    "patch",
    [
        "*** Begin Patch\n*** Add File: a.txt\n+hello\n+\n*** End Patch\n",
        "*** Begin Patch\n*** Delete File: a b.txt\n*** End Patch",
        (
            "*** Begin Patch\n*** Update File: ä.py\n*** Move to: b.py\n@@ def f():\n-x\n+ü\n y\n*** End of File\n"
            "*** End Patch\n"
        ),
    ],
)
def test_codex_patches_match_its_grammar(patch: str) -> None:
    assert explain_mismatch(patch, APPLY_PATCH) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("*** Begin Patch\n", "it ends too early, after '*** Begin Patch\\n'"),
        (
            "*** Begin Patch\n*** Make File: a\n",
            "it does not fit the grammar from 'Make File: a\\n' on, which follows '*** Begin Patch\\n*** '",
        ),
    ],
)
def test_mismatch_names_its_position(text: str, fault: str) -> None:
    assert explain_mismatch(text, APPLY_PATCH) == fault


@pytest.mark.parametrize("length", [1023, 1024, 1025, 5000])
def test_mismatch_in_a_long_text_is_found(length: int) -> None:
    letters = GrammarInput("start: /a+/", "lark")
    assert explain_mismatch("a" * length, letters) is None
    fault = f"it does not fit the grammar from 'b' on, which follows {'a' * 60!r}"
    assert explain_mismatch("a" * length + "b", letters) == fault
    assert matches_pattern("a" * length + "b", "^a+$") is False


def test_regular_expression_must_match_the_whole_text() -> None:
    digits = GrammarInput("[a-z]+[0-9]", "regex")
    assert [explain_mismatch(text, digits) is None for text in ("ab1", "ab", "ab12", "")] == [True, False, False, False]


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("b", "abc", True),
        ("^b", "abc", False),
        ("^a|d$", "abc", True),
        ("^$", "", True),
        (r"^\d+$", "12", True),
        (r"^\p{L}+$", "äö", True),
        ('^[\x7f\n"\\\\]+$', '\x7f\n"\\', True),
        ("^.$", "\N{GRINNING FACE}", True),
        ("^(a+)+$", "a" * 40 + "b", False),
        ("(x+x+)+y", "x" * 10_000, False),
        ("^(?=a)", "a", None),
        (r"(a)\1", "aa", None),
        ("(", "a", None),
        ("(a?b?c?d?){900}z" * 9, "abcd" * 900, None),
        ("a" * 50_001, "a", None),
    ],
)
def test_pattern_matches_anywhere_in_linear_time(pattern: str, text: str, fits: bool | None) -> None:
    assert matches_pattern(text, pattern) is fits
