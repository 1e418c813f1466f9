"""The `[CONTEXT]` block, byte for byte, and the choice of its chunks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.agent.execute.envelope import SourceRef
from antiphon.agent.execute.rag import Chunk, build_context, count_candidates


def chunk(**fields: Any) -> Chunk:
    return Chunk(**({"id": "hit-1", "path": "src/a.cs", "start_line": 3, "end_line": 9, "text": "class A {}"} | fields))


def test_chunks_are_numbered_with_metadata_in_fixed_order() -> None:
    context = build_context([chunk(score=2, semantic_id="A#1"), chunk(id="hit-2", path="b.md", text="# B", score=1)])
    assert context.block == (
        "[CONTEXT]\n\n"
        "=== CHUNK 1 ===\nId: A#1\nPath: src/a.cs\nLines: 3-9\nLanguage: csharp\n```csharp\nclass A {}\n```\n\n"
        "=== CHUNK 2 ===\nId: hit-2\nPath: b.md\nLines: 3-9\nLanguage: markdown\n```markdown\n# B\n```\n\n"
    )
    assert context.sources == [
        SourceRef(tag="A#1", path="src/a.cs", file_name="a.cs", start=3, end=9, excerpt="class A {}"),
        SourceRef(tag="hit-2", path="b.md", file_name="b.md", start=3, end=9, excerpt="# B"),
    ]


def test_empty_hits_have_an_empty_block() -> None:
    context = build_context([])
    assert (context.block, context.sources) == ("[CONTEXT]\r\n\r\n", [])


def test_symbol_of_a_file_appears_once_with_its_best_hit() -> None:
    hits = [
        chunk(id="1", symbol="Run", score=0.1),
        chunk(id="2", symbol="RUN", path="SRC/A.cs", score=0.9),
        chunk(id="3", symbol="Stop", score=0.5),
    ]
    assert [source.tag for source in build_context(hits).sources] == ["2", "3"]


def test_only_the_best_hits_are_used() -> None:
    hits = [chunk(id=str(number), symbol=str(number), score=number) for number in range(20)]
    assert [source.tag for source in build_context(hits, top_k=3).sources] == ["19", "18", "17"]
    assert len(build_context(hits).sources) == 8


def test_end_line_before_the_start_becomes_the_start() -> None:
    assert "Lines: 7-7\n" in build_context([chunk(start_line=7, end_line=2)]).block


@pytest.mark.parametrize(
    ("path", "language"),
    [("a.TS", "typescript"), ("a.tsx", "tsx"), ("a.js", "javascript"), ("a.json", "json"), ("a.css", "scss"),
     ("a.scss", "scss"), ("a.xml", "xml"), ("a.py", "plaintext"), ("Makefile", "plaintext")],
)  # fmt: skip
def test_language_follows_from_the_file_extension(path: str, language: str) -> None:
    assert f"Language: {language}\n" in build_context([chunk(path=path)]).block


@pytest.mark.parametrize(("top_k", "candidates"), [(1, 12), (4, 12), (8, 24), (100, 50)])
def test_more_hits_are_requested_than_used(top_k: int, candidates: int) -> None:
    assert count_candidates(top_k) == candidates


@given(st.text(alphabet="`a\n", max_size=40))
def test_fence_is_longer_than_any_in_the_text(text: str) -> None:
    block = build_context([chunk(text=text)]).block
    opening = next(line for line in block.split("\n") if line.startswith("```") and line.endswith("csharp"))
    fence = opening.removesuffix("csharp")
    assert block.removesuffix("\n\n").endswith(f"\n{fence}")
    assert fence not in text
