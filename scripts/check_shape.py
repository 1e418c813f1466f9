"""Check rules that the linters lack: file and function length, vague file names, empty inner `__init__.py` files.

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


def main(arguments: list[str]) -> int:
    missing = [argument for argument in arguments if not Path(argument).is_dir()]
    if missing or not arguments:
        print(f"not a directory: {', '.join(missing)}" if missing else "name the directories to check", file=sys.stderr)
        return 2
    files = [path for argument in arguments for path in sorted(Path(argument).rglob("*.py"))]
    faults = [fault for path in files for fault in check_file(path)]
    for fault in faults:
        print(fault)
    print(f"shape: {len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
