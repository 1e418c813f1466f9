"""The `[CONTEXT]` block: chunks of text for the model to answer from, and their source references."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from antiphon.agent.execute.envelope import SourceRef

HEADER = "[CONTEXT]"
_EMPTY = "[CONTEXT]\r\n\r\n"
_MIN_CANDIDATES, _MAX_CANDIDATES = 12, 50
_LANGUAGES = {
    ".cs": "csharp",
    ".ts": "typescript",
    ".tsx": "tsx",
    ".js": "javascript",
    ".json": "json",
    ".scss": "scss",
    ".css": "scss",
    ".xml": "xml",
    ".md": "markdown",
}


class Chunk(Struct, frozen=True, kw_only=True):
    """A chunk of a file that a search has found. Answers cite it by `semantic_id`, or else by `id`."""

    id: str
    path: str
    start_line: int
    end_line: int
    text: str
    score: float = 0.0
    semantic_id: str | None = None
    symbol: str | None = None
    symbol_type: str | None = None

    @property
    def tag(self) -> str:
        return self.semantic_id or self.id

    @property
    def lines(self) -> tuple[int, int]:
        return self.start_line, max(self.start_line, self.end_line)


class RagContext(Struct, frozen=True):
    """The block for the request, and its sources in the same order."""

    block: str
    sources: list[SourceRef]


def count_candidates(top_k: int) -> int:
    """Return the number of hits to request from a search, so that enough are left after removing duplicates."""
    return min(max(top_k * 3, _MIN_CANDIDATES), _MAX_CANDIDATES)


def build_context(hits: Sequence[Chunk], *, top_k: int = 8) -> RagContext:
    """Build the block from the best hits, with each symbol of a file once."""
    chosen = _choose(hits, top_k)
    if not chosen:
        return RagContext(_EMPTY, [])
    chunks = [_render(chunk, number) for number, chunk in enumerate(chosen, start=1)]
    return RagContext(f"{HEADER}\n\n{''.join(chunks)}", [_make_source(chunk) for chunk in chosen])


def _choose(hits: Sequence[Chunk], top_k: int) -> list[Chunk]:
    best: dict[str, Chunk] = {}
    for hit in sorted(hits, key=lambda hit: -hit.score):
        best.setdefault(f"{hit.path}::{hit.symbol or ''}".lower(), hit)
    return list(best.values())[:top_k]


def _render(chunk: Chunk, number: int) -> str:
    start, end = chunk.lines
    language = _find_language(chunk.path)
    fence = _make_fence(chunk.text)
    lines = (
        f"=== CHUNK {number} ===",
        f"Id: {chunk.tag}",
        f"Path: {chunk.path}",
        f"Lines: {start}-{end}",
        f"Language: {language}",
        f"{fence}{language}",
        chunk.text,
        fence,
        "",
    )
    return "".join(f"{line}\n" for line in lines)


def _make_fence(text: str) -> str:
    """Return a fence that is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    return "`" * (longest + 1)


def _find_language(path: str) -> str:
    return _LANGUAGES.get(PurePosixPath(path).suffix.lower(), "plaintext")


def _make_source(chunk: Chunk) -> SourceRef:
    start, end = chunk.lines
    return SourceRef(
        tag=chunk.tag,
        path=chunk.path,
        file_name=PurePosixPath(chunk.path).name,
        start=start,
        end=end,
        excerpt=chunk.text,
        symbol=chunk.symbol,
        symbol_type=chunk.symbol_type,
    )
