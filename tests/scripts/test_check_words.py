import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_words.py"


def check(directory: Path, *roots: str) -> tuple[int, list[str]]:
    """Return the exit code and the printed lines of a run in `directory`."""
    command = [sys.executable, SCRIPT, *(roots or ["src"])]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout.splitlines()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def find_faults(directory: Path, source: str) -> list[str]:
    """Return the faults in a module with this source, without its path."""
    write(directory / "src/module.py", source)
    _, lines = check(directory)
    return [line.removeprefix("src/module.py:") for line in lines[:-1]]


def test_ordinary_names_and_texts_pass(tmp_path: Path) -> None:
    write(
        tmp_path / "src/replay.py",
        '"""Replay events. The reader decides what to skip."""\n\n'
        "# Proxies close idle streams, whatever the client does.\n"
        "KEEPALIVE_SECONDS = 15  # seconds\n\n\n"
        "def replace_in_place(raises: list[str]) -> list[str]:\n"
        '    """Return True if the text is replaced."""\n'
        "    always = [each.told for each in raises]\n"
        "    return always\n",
    )
    write(tmp_path / "tests/test_replay.py", f"def test_{'x' * 80}() -> None: ...\n")

    assert check(tmp_path, "src", "tests") == (0, ["words: 2 files, 0 faults"])


@pytest.mark.parametrize(
    "source",
    [
        "told = 1\n",
        "def told(): ...\n",
        "class told: ...\n",
        "def run(told): ...\n",
        "def run(*told): ...\n",
        "def run(*, told=1): ...\n",
        "run = lambda told: 1\n",
        "for told in (): ...\n",
        "run.told = 1\n",
        "class Run:\n    told: int\n",
        "import antiphon as told\n",
        "from antiphon import errors as told\n",
        "try: ...\nexcept OSError as told: ...\n",
        "match 1:\n    case told: ...\n",
        "match []:\n    case [*told]: ...\n",
        "if (told := 1): ...\n",
        "with open('x') as told: ...\n",
    ],
)
def test_every_kind_of_definition_is_checked(tmp_path: Path, source: str) -> None:
    faults = find_faults(tmp_path, source)
    assert [fault.partition(": ")[2] for fault in faults] == [
        "`told` is not used as a name: use events, deltas, warnings or payload"
    ]


@pytest.mark.parametrize("name", ["tell_all", "_tell", "TELL_ALL", "TellAll", "tellAll", "HTTPTell", "x2_tell"])
def test_every_part_of_a_name_is_checked(tmp_path: Path, name: str) -> None:
    assert find_faults(tmp_path, f"{name} = 1\n") == [
        f"1: {name}: `tell` is not used as a name: use emit, send, report or warn"
    ]


def test_a_name_is_reported_once_per_file(tmp_path: Path) -> None:
    assert find_faults(tmp_path, "x = 1\nkept = 1\nkept = 2\n") == [
        "2: `kept` is not used as a name: use stored, saved or retained"
    ]


def test_uses_of_other_libraries_names_pass(tmp_path: Path) -> None:
    assert find_faults(tmp_path, "import io\n\nend = io.BytesIO().tell()\nrun(place=1)\n") == []


def test_module_and_folder_names_are_checked(tmp_path: Path) -> None:
    write(tmp_path / "src/engine/lifeline/__init__.py", "")
    write(tmp_path / "src/engine/places.py", "")

    assert check(tmp_path) == (
        1,
        [
            "src/engine/lifeline/__init__.py: `lifeline` is not used as a name: use read_timeout",
            "src/engine/places.py: `places` is not used as a name: use paths, params, positions or indexes",
            "words: 2 files, 2 faults",
        ],
    )


def test_bare_openings_of_docstrings_are_named(tmp_path: Path) -> None:
    source = (
        '"""What a module has."""\n\n\n'
        'class Run:\n    """Whoever runs."""\n\n'
        '    def is_over(self) -> bool:\n        """Whether it is over.\n\n        Return True then. Who asks\n'
        '        waits. Those wait, too.\n        """\n'
    )
    assert find_faults(tmp_path, source) == [
        "1: a docstring starts with a noun or a verb, not with 'What'",
        "5: a docstring starts with a noun or a verb, not with 'Whoever'",
        "8: a docstring starts with a noun or a verb, not with 'Whether'",
        "10: a sentence starts with a noun or a verb, not with 'Who'",
        "11: a sentence starts with a noun or a verb, not with 'Those'",
    ]


def test_bare_openings_of_comments_are_named(tmp_path: Path) -> None:
    source = (
        "# Nobody reads this\n"
        "x = 1  # what it is\n"
        "# A line of a comment may start with\n"
        "# what it likes. Whatever starts\n"
        "# a sentence is a fault.\n"
    )
    assert find_faults(tmp_path, source) == [
        "1: a comment starts with a noun or a verb, not with 'Nobody'",
        "2: a comment starts with a noun or a verb, not with 'What'",
        "4: a sentence starts with a noun or a verb, not with 'Whatever'",
    ]


def test_strings_are_not_comments(tmp_path: Path) -> None:
    assert find_faults(tmp_path, "question = '# What is it?'\n") == []


def test_test_names_have_a_subject_and_a_limit(tmp_path: Path) -> None:
    long = f"test_{'x' * 81}"
    assert find_faults(tmp_path, f"def test_what_is_new(): ...\nasync def {long}(): ...\n") == [
        "1: test_what_is_new: a test name states its subject and the outcome",
        f"2: {long} has 86 characters, at most 85 are allowed",
    ]


def test_pages_are_checked_outside_of_code(tmp_path: Path) -> None:
    page = (
        "# What it is\n\n"
        "A page has **Who** in it. Whoever reads it\n"
        "is a reader. A line may start with\n"
        "What it likes.\n\n"
        "- Where it is\n"
        "- 1. Not here: which is fine\n\n"
        "| a | b |\n|---|---|\n| x | How it works |\n\n"
        "```text\nWhat is printed\n\n| What |\n# What\n```\n\n"
        "**Those** are bold.\n"
    )
    write(tmp_path / "docs/page.md", page)

    assert check(tmp_path, "docs/page.md") == (
        1,
        [
            "docs/page.md:1: a heading starts with a noun or a verb, not with 'What'",
            "docs/page.md:3: a sentence starts with a noun or a verb, not with 'Whoever'",
            "docs/page.md:7: a paragraph starts with a noun or a verb, not with 'Where'",
            "docs/page.md:12: a table cell starts with a noun or a verb, not with 'How'",
            "docs/page.md:21: a paragraph starts with a noun or a verb, not with 'Those'",
            "words: 1 files, 5 faults",
        ],
    )


def test_long_lines_of_text_are_reported(tmp_path: Path) -> None:
    long = "x " * 61
    page = (
        f"# {long}\n\nA paragraph has\n{long.strip()}x\n\n- {long}\n\n"
        f"| a |\n|---|\n| {long} |\n\n```text\n{long}\n```\n\n    {long}\n\n"
        f"<!-- figures: begin -->\n\n{long}\n\n<!-- figures: end -->\n\n{long}\n"
    )
    write(tmp_path / "page.md", page)

    assert check(tmp_path, "page.md") == (
        1,
        [
            "page.md:4: a line has 122 characters, at most 120 are allowed",
            "page.md:6: a line has 124 characters, at most 120 are allowed",
            "page.md:24: a line has 122 characters, at most 120 are allowed",
            "words: 1 files, 3 faults",
        ],
    )


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    assert check(tmp_path) == (2, [])
