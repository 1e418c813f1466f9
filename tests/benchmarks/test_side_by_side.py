"""The comparison with other servers: a short run of our own server, the checks of answers, and the pages."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.client import Answer, InvalidAnswer  # noqa: E402
from benchmarks.side_by_side import upstream  # noqa: E402
from benchmarks.side_by_side.models import CHAIN, PLAIN, TOOL  # noqa: E402
from benchmarks.side_by_side.works import WORKS, Work, check  # noqa: E402

from benchmarks import page, peers  # noqa: E402

WHOLE = Work("plain", PLAIN, stream=False, store=False, concurrency=1)
STREAMED = WHOLE._replace(stream=True)


def make_answer(work: Work, *, number: int = 0, old: bytes = b"", new: bytes = b"") -> Answer:
    """Return the upstream's own answer, with one replacement of the same length."""
    writes = upstream.prepare_answers()["/v1/responses", work.model, number, work.stream].writes
    head, _, body = b"".join(writes).partition(b"\r\n\r\n")
    assert len(old) == len(new)
    assert not old or old in body
    return Answer(head + b"\r\n\r\n", body.replace(old, new, 1), 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc of Linux")
def test_quick_run_measures_every_work_and_leaves_no_files(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.side_by_side", "--quick", "--json", str(figures)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert {work["name"] for work in found["works"]} == {work.name for work in WORKS}
    for work in found["works"]:
        for server in ("Antiphon", "Antiphon (R)"):
            assert work["servers"][server].get("rate", 0) > 0, (work["name"], work["servers"][server])
    assert found["processes"].keys() == {"Antiphon", "Antiphon (R)"}
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("work", "turn"),
    [(WHOLE, 0), (STREAMED, 0), (STREAMED._replace(model=CHAIN), 3), (STREAMED._replace(model=TOOL), 0)],
    ids=["whole", "streamed", "chain", "tool"],
)
def test_right_answer_passes_the_check(work: Work, turn: int) -> None:
    assert check(work, make_answer(work, number=turn), turn=turn).startswith("resp_")


@pytest.mark.parametrize(
    ("work", "old", "new", "message"),
    [
        (WHOLE, b"The rain", b"The hail", "wrong text"),
        (WHOLE, b'"status":"completed"', b'"status":"cancelled"', "the response is cancelled"),
        (STREAMED, b'"delta":" rain"', b'"delta":" hail"', "not one for each"),
        (
            STREAMED,
            b"event: response.completed\ndata: {",
            b"event: response.completed\nnone: {",
            "no response.completed",
        ),
        (STREAMED._replace(model=TOOL), b'"type":"function_call"', b'"type":"function_cull"', "wrong call"),
    ],
    ids=["text", "status", "delta", "end", "call"],
)
def test_wrong_answer_fails_the_check(work: Work, old: bytes, new: bytes, message: str) -> None:
    answer = make_answer(work, old=old, new=new)
    if work.model == TOOL:
        answer = answer._replace(body=answer.body.replace(old, new))
    with pytest.raises(InvalidAnswer, match=message):
        check(work, answer)


def test_pages_show_the_recorded_figures() -> None:
    for path, text in page.render(page.load()).items():
        assert path.read_text() == text, f"{path.name} is out of date: run `python -m benchmarks.page`"


def test_section_is_replaced_between_its_markers_only() -> None:
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert page.replace_section(text, "x", "new") == "a\n<!-- x: begin -->\n\nnew\n\n<!-- x: end -->\nb\n"
    assert page.replace_section(text, "y", "new") == text


def test_chart_is_valid_xml_with_a_bar_for_each_server() -> None:
    servers = {"Antiphon": {"rate": 100.0}, "LiteLLM": {"rate": 2.0}, "OGX": {"reason": "did not start"}}
    work = {"name": "plain", "concurrency": 32, "store": True, "servers": servers}
    drawn = ET.fromstring(page.chart.draw({"works": [work]}))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 2


def test_missing_python_version_is_reported() -> None:
    with pytest.raises(peers.PeersUnavailable, match=r"needs Python 3\.99 or newer"):
        peers.find_python((3, 99))
