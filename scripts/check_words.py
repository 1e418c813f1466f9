"""Check names, test names, docstrings, comments and Markdown pages against the word lists and limits below.

    python scripts/check_words.py PATH ...

A path is a directory with Python modules, or a Markdown page. Prints one line for each fault and exits with 1 if there
is any. CONTRIBUTING.md explains the rules.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Words that are not used in names, and the words to use instead. A name is split at underscores and capitals, so the
# list does not match `keepalive`, `always` or `replace`.
REPLACEMENTS = {
    "abandon": "discard, release or give_up",
    "adherence": "strict_output",
    "asked": "requested, or input_items",
    "gathering": "reader or collect",
    "hear": "receive or read",
    "heard": "received or read",
    "hearing": "receiving or reading",
    "hears": "receives or reads",
    "heed": "apply or respect",
    "keeper": "sink or store",
    "keeping": "persistence, or the verb save or store",
    "keepsake": "opaque_state",
    "kept": "stored, saved or retained",
    "lifeline": "read_timeout",
    "lowered": "translated, or lower_case for text",
    "lowering": "translate_request",
    "mend": "repair",
    "mended": "repaired",
    "nobody": "none, unknown or no_client",
    "nudge": "wake or remind",
    "place": "path, param, position or index",
    "places": "paths, params, positions or indexes",
    "raising": "translate_response, or failing for an exception",
    "recollection": "events_to_deltas",
    "retelling": "replay",
    "said": "text, output or content",
    "speak": "emit, write or answer",
    "speaks": "emits, writes, or supports for a protocol",
    "spoken": "text or output",
    "tell": "emit, send, report or warn",
    "tells": "emits, sends, reports or warns",
    "tending": "supervisor or supervise",
    "told": "events, deltas, warnings or payload",
    "ways": "a noun for the choice, such as transports or routes",
    "whoever": "client, caller or reader",
}
# Ordinary terms with one of the words in them.
ALLOWED_TERMS = ("in_place",)

# No docstring, comment, heading, paragraph, or sentence in them starts with one of these.
BARE_OPENINGS = ("How", "Nobody", "Those", "What", "Whatever", "Where", "Whether", "Which", "Who", "Whoever")
BARE_TEST_PREFIXES = ("test_what_", "test_whatever_", "test_who_")
MAX_TEST_NAME = 85
# Characters of a line of a page. Tables, code and generated sections may have longer ones.
MAX_LINE = 120

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PART_START = re.compile(r"\s*(#|[-*] |\d+\. |\|)")
_FIRST_WORD = re.compile(rf"\W*({'|'.join(BARE_OPENINGS)})\b", re.IGNORECASE)
_SENTENCE = re.compile(rf"(?<=[a-z0-9`)][.!?]) +({'|'.join(BARE_OPENINGS)})\b")


class Definition(NamedTuple):
    line: int
    name: str


class Text(NamedTuple):
    """A docstring, the comments on consecutive lines, or a part of a page."""

    line: int
    kind: str
    content: str


# Names


def check_name(name: str) -> Iterator[str]:
    """Yield the faults of one name."""
    shortened = name
    for term in ALLOWED_TERMS:
        shortened = shortened.replace(term, "")
    for word in dict.fromkeys(part.lower() for part in _PART.findall(shortened)):
        if word in REPLACEMENTS:
            prefix = "" if word == name else f"{name}: "
            yield f"{prefix}`{word}` is not used as a name: use {REPLACEMENTS[word]}"


def find_definitions(tree: ast.Module) -> Iterator[Definition]:
    """Yield every name that a module defines: functions, classes, arguments, variables, attributes, imports."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield Definition(node.lineno, name)
            case ast.arg(arg=name):
                yield Definition(node.lineno, name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield Definition(node.lineno, name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield Definition(node.lineno, name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (Definition(node.lineno, alias.asname) for alias in aliases if alias.asname)


def check_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the faults of the names in a module, each name once."""
    first: dict[str, int] = {}
    for definition in find_definitions(tree):
        first[definition.name] = min(definition.line, first.get(definition.name, definition.line))
    for name, line in first.items():
        yield from ((line, fault) for fault in check_name(name))


def check_test_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            if node.name.startswith(BARE_TEST_PREFIXES):
                yield node.lineno, f"{node.name}: a test name states its subject and the outcome"
            if len(node.name) > MAX_TEST_NAME:
                yield node.lineno, f"{node.name} has {len(node.name)} characters, at most {MAX_TEST_NAME} are allowed"


# Texts


def find_docstrings(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Text(node.body[0].lineno, "docstring", docstring)


def find_comments(source: str) -> Iterator[Text]:
    """Yield the comments of a module. Comments alone on consecutive lines are one text."""
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            continues = block and token.start == (block[-1].start[0] + 1, block[-1].start[1])
            alone = not token.line[: token.start[1]].strip()
            if block and not (continues and alone):
                yield _join_comments(block)
                block = []
            block.append(token)
    if block:
        yield _join_comments(block)


def _join_comments(block: list[tokenize.TokenInfo]) -> Text:
    return Text(block[0].start[0], "comment", "\n".join(token.string.lstrip("#").strip() for token in block))


def check_text(text: Text) -> Iterator[tuple[int, str]]:
    """Yield a fault if the text, or a sentence in it, starts with a bare What, Who and the like."""
    start = _FIRST_WORD.match(text.content)
    if start:
        yield text.line, f"a {text.kind} starts with a noun or a verb, not with {start[1].capitalize()!r}"
    for sentence in _SENTENCE.finditer(text.content.replace("\n", " ")):
        line = text.line + text.content.count("\n", 0, sentence.start(1))
        yield line, f"a sentence starts with a noun or a verb, not with {sentence[1]!r}"


def find_parts(page: str) -> Iterator[Text]:
    """Yield the headings, table cells, paragraphs and list items of a Markdown page, without code blocks."""
    in_code = False
    first, block = 0, ""
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        content = "" if in_code or is_fence else line
        if block and (not content.strip() or _PART_START.match(content)):
            yield Text(first, "paragraph", block)
            block = ""
        if content.startswith("|"):
            yield from (Text(number, "table cell", cell) for cell in content.split("|"))
        elif content.startswith("#"):
            yield Text(number, "heading", content)
        elif content.strip():
            first, block = (first, f"{block}\n{content}") if block else (number, content)


def find_generated_lines(page: str) -> set[int]:
    """Return the numbers of the lines between `<!-- name: begin -->` and `<!-- name: end -->`."""
    numbers: set[int] = set()
    is_generated = False
    for number, line in enumerate(page.splitlines(), start=1):
        if line.startswith("<!--"):
            is_generated = line.endswith(": begin -->")
        elif is_generated:
            numbers.add(number)
    return numbers


def check_lines(text: Text) -> Iterator[tuple[int, str]]:
    """Yield a fault for each line of a paragraph that is too long. A line that is indented by four spaces is code."""
    for number, line in enumerate(text.content.split("\n"), start=text.line):
        if len(line) > MAX_LINE and not line.startswith("    "):
            yield number, f"a line has {len(line)} characters, at most {MAX_LINE} are allowed"


# Files


def check_page(path: Path) -> Iterator[str]:
    page = path.read_text(encoding="utf-8")
    generated = find_generated_lines(page)
    for text in find_parts(page):
        faults = [*check_text(text)]
        if text.kind == "paragraph" and text.line not in generated:
            faults += check_lines(text)
        yield from (f"{path}:{line}: {fault}" for line, fault in faults)


def check_module(path: Path, root: Path) -> Iterator[str]:
    for part in path.relative_to(root).with_suffix("").parts:
        yield from (f"{path}: {fault}" for fault in check_name(part))
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, filename=str(path))
    faults = [*check_names(tree), *check_test_names(tree)]
    for text in (*find_docstrings(tree), *find_comments(source)):
        faults.extend(check_text(text))
    yield from (f"{path}:{line}: {fault}" for line, fault in sorted(faults))


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments]
    missing = [str(path) for path in paths if not (path.is_dir() or (path.is_file() and path.suffix == ".md"))]
    if missing or not paths:
        wrong = f"neither a directory nor a Markdown page: {', '.join(missing)}"
        print(wrong if missing else "name the paths to check", file=sys.stderr)
        return 2
    pages = [path for path in paths if path.is_file()]
    modules = [(path, root) for root in paths if root.is_dir() for path in sorted(root.rglob("*.py"))]
    faults = [fault for path, root in modules for fault in check_module(path, root)]
    faults += [fault for page in pages for fault in check_page(page)]
    for fault in faults:
        print(fault)
    print(f"words: {len(modules) + len(pages)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
