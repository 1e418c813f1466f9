"""The process that reads files: limits, failures and its end when it is idle."""

import asyncio
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import msgspec
import pytest

from antiphon.config.limits import FileLimits
from antiphon.errors import Unavailable
from antiphon.retrieval import worker
from antiphon.retrieval.extract import Unreadable
from antiphon.retrieval.messages import ReaderSetup, ReadJob, ReadProgress
from antiphon.retrieval.process import FileReader
from antiphon.worker_frames import read_frame, write_frame
from support.documents import make_pdf

pytest.importorskip("pypdfium2")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "content"


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


async def read(reader: FileReader, path: Path, name: str, content: bytes) -> str:
    return await reader.read_text(write(path, content), name)


async def test_one_process_reads_several_files_and_ends_when_idle(path: Path) -> None:
    reader = FileReader(FileLimits(idle_seconds=0.2), embed=False)
    assert await read(reader, path, "a.pdf", make_pdf("One")) == "One"
    process = reader._process
    assert process is not None
    assert await read(reader, path, "a.txt", b"Two" * 200_000) == "Two" * 200_000
    with pytest.raises(Unreadable, match="not a valid PDF"):
        await read(reader, path, "a.pdf", b"%PDF broken")
    with pytest.raises(Unreadable, match=r"cannot be read: No such file or directory\.$"):  # deleted meanwhile
        await reader.read_text(str(path.with_name("deleted")), "a.txt")
    assert reader._process is process
    ended, end = asyncio.Event(), process.end

    async def end_and_report() -> None:
        await end()
        ended.set()

    process.end = end_and_report  # type: ignore[method-assign]
    await ended.wait()
    assert process.has_ended
    await reader.close()


def test_error_of_a_parser_without_a_number_has_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: ReadJob, model: object) -> Iterator[ReadProgress]:
        raise OSError("broken")
        yield ReadProgress()

    monkeypatch.setattr(worker, "_limit_memory", lambda megabytes: None)
    monkeypatch.setattr(worker, "run_job", fail)
    stdin, stdout = BytesIO(), BytesIO()
    write_frame(stdin, ReaderSetup(megabytes=100, embed=False))
    write_frame(stdin, ReadJob("a", "a.txt", 100, 0, 1.0, 100, 100))
    stdin.seek(0)
    worker.work(stdin, stdout)
    stdout.seek(0)
    read_frame(stdout)  # ready
    found = msgspec.msgpack.decode(read_frame(stdout) or b"", type=ReadProgress)
    assert (found.code, found.message) == ("server_error", "The file cannot be read: OSError.")


async def test_file_that_takes_too_long_is_unreadable_and_the_next_is_read(path: Path) -> None:
    reader = FileReader(FileLimits(parse_seconds=0.05), embed=False)
    rows = b"a,b\n" + b"1,2\n" * 2_000_000
    with pytest.raises(Unreadable, match=r"more than 0.05 seconds") as caught:
        await read(reader, path, "a.csv", rows)
    assert caught.value.code == "invalid_file"
    assert await read(reader, path, "a.txt", b"Next.") == "Next."
    await reader.close()


async def test_file_that_needs_too_much_memory_is_unreadable(path: Path) -> None:
    reader = FileReader(FileLimits(worker_megabytes=64), embed=False)
    with pytest.raises(Unreadable, match="memory") as caught:
        await read(reader, path, "a.csv", b"a,b\n" + b"1,2\n" * 2_000_000)
    assert caught.value.code == "invalid_file"
    await reader.close()


async def test_closed_reader_reads_no_file(path: Path) -> None:
    reader = FileReader(FileLimits(), embed=False)
    await reader.close()
    with pytest.raises(Unavailable):
        await read(reader, path, "a.txt", b"x")


async def test_chunks_without_the_local_model_have_no_vectors(path: Path) -> None:
    reader = FileReader(FileLimits(), embed=False)
    text = " ".join(f"word{index}" for index in range(300))
    name = write(path, text.encode())
    batches = [batch async for batch in reader.read(name, "a.txt", chunk_tokens=100, overlap_tokens=0)]
    chunks = [chunk for batch in batches for chunk in batch]
    assert "".join(chunk.text for chunk in chunks) == text
    assert {chunk.vectors for chunk in chunks} == {b""}
    await reader.close()
