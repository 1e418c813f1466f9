"""Check rules that the linters lack: file and function length, vague file names, empty inner `__init__.py` files, and
class names that occur twice in the package.

    python scripts/check_shape.py PATH ...

Prints one line for each fault and exits with 1 if there is any. There are no exemptions, also not from complexity.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
VAGUE_NAMES = {"common", "helper", "helpers", "manager", "misc", "shared", "util", "utils"}
PUBLIC_SURFACES = {Path("src/antiphon/__init__.py"), Path("src/antiphon/backends/__init__.py")}
# Public class names that two modules of the package may share, and the reason.
SHARED_CLASS_NAMES = {
    "Agent": "antiphon.Agent is the agent of antiphon.agent with an engine in the same process",
    "CustomToolCall": "a delta is named like the item that it produces",
    "Reasoning": "a delta is named like the item that it produces",
    "ReasoningDelta": "an event of an agent run is named like the stream event that it reports",
    "Refusal": "a delta is named like the content part that it produces",
    "Text": "a delta is named like the content part that it produces",
    "ToolCall": "the provider's API is fixed, and a delta is named like the item that it produces",
    "Turn": "the provider's API is fixed",
}
COMPLEXITY_EXEMPTION = re.compile(r"#\s*noqa:.*\bC901\b")


def check_file(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield f"{path}: {len(lines)} lines, at most {MAX_FILE_LINES} are allowed"
    if VAGUE_NAMES.intersection(path.stem.strip("_").split("_")) or path.parent.name in VAGUE_NAMES:
        yield f"{path}: the name is too vague: use a noun for the contents"
    if path.name == "__init__.py" and source.strip() and path not in PUBLIC_SURFACES:
        yield f"{path}: an inner __init__.py must be empty: re-exports hide imports"
    for number, line in enumerate(lines, start=1):
        if COMPLEXITY_EXEMPTION.search(line):
            yield f"{path}:{number}: exemptions from the complexity limit are not allowed"
    yield from check_functions(path, source)


def check_functions(path: Path, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None  # set by ast.parse on every node
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES} are allowed"


def check_class_names(paths: list[Path]) -> Iterator[str]:
    """Yield a fault for each public class of the package whose name another module has already."""
    first: dict[str, Path] = {}
    for path in paths:
        if "src" not in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or node.name in SHARED_CLASS_NAMES:
                continue
            if node.name in first:
                yield f"{path}:{node.lineno}: the class name {node.name} is used in {first[node.name]} too"
            first.setdefault(node.name, path)


def main(arguments: list[str]) -> int:
    missing = [argument for argument in arguments if not Path(argument).is_dir()]
    if missing or not arguments:
        print(f"not a directory: {', '.join(missing)}" if missing else "name the directories to check", file=sys.stderr)
        return 2
    files = [path for argument in arguments for path in sorted(Path(argument).rglob("*.py"))]
    faults = [*(fault for path in files for fault in check_file(path)), *check_class_names(files)]
    for fault in faults:
        print(fault)
    print(f"shape: {len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
