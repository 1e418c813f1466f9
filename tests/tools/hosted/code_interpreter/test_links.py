"""Links to files of a container are found in text that arrives in pieces."""

import pytest

from antiphon.tools.hosted.code_interpreter.links import FileLink, LinkedFile, LinkFinder

DATA = LinkedFile("cfile_1", "/mnt/data/data.csv")
PACKED = LinkedFile("cfile_2", "/mnt/data/data.csv.gz")
SPACED = LinkedFile("cfile_3", "/mnt/data/sub/my plot.png")
FILES = (DATA, PACKED, SPACED)


def find(text: str, size: int = 1000) -> list[FileLink]:
    finder = LinkFinder(FILES)
    links = [link for start in range(0, len(text), size) for link in finder.feed(text[start : start + size])]
    return links + finder.feed("", is_last=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
def test_link_ranges_do_not_depend_on_the_pieces(size: int) -> None:
    text = (
        "See [data](sandbox:/mnt/data/data.csv), [packed](sandbox:/mnt/data/data.csv.gz) "
        "and ![plot](sandbox:/mnt/data/sub/my%20plot.png) or sandbox:/mnt/data/data.csv."
    )
    links = find(text, size)
    assert [(link.file, text[link.start : link.end]) for link in links] == [
        (DATA, "sandbox:/mnt/data/data.csv"),
        (PACKED, "sandbox:/mnt/data/data.csv.gz"),
        (SPACED, "sandbox:/mnt/data/sub/my%20plot.png"),
        (DATA, "sandbox:/mnt/data/data.csv"),
    ]


def test_link_is_reported_when_the_text_after_it_arrives() -> None:
    finder = LinkFinder(FILES)
    assert finder.feed("(sandbox:/mnt/data/data.csv") == []
    assert finder.feed(")") == [FileLink(DATA, 1, 27)]


def test_link_at_the_end_of_the_text_is_reported_at_the_end() -> None:
    finder = LinkFinder(FILES)
    assert finder.feed("sandbox:/mnt/data/data.csv.") == []
    assert finder.feed("", is_last=True) == [FileLink(DATA, 0, 26)]


def test_path_with_a_space_is_found_unquoted() -> None:
    assert find("[x](sandbox:/mnt/data/sub/my plot.png)") == [FileLink(SPACED, 4, 37)]


@pytest.mark.parametrize(
    "text",
    ["sandbox:/mnt/data/other.csv", "sandbox:/mnt/data/data.csvx ", "/mnt/data/data.csv", "sandbox:", "sandbox:/mnt"],
)
def test_text_that_names_no_file_has_no_links(text: str) -> None:
    assert find(text) == []
    assert find(text, 1) == []
