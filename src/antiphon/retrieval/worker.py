"""The process that reads files: it extracts their text, splits it into chunks, and computes vectors.

`antiphon.retrieval.process` starts it. A file that is too large or makes a parser crash ends only this process. Frames
on stdin and stdout are msgpack with a length of four bytes: first a `ReaderSetup`, then one `ReadJob` after the other.
Each job is answered by one or more `ReadProgress`. The process ends with its stdin.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from antiphon.retrieval.chunking import ChunkedText, EstimatingTokenizer, TextChunk
from antiphon.retrieval.extract import INVALID, Unreadable, extract_text
from antiphon.retrieval.messages import ReadChunk, ReaderReady, ReaderSetup, ReadJob, ReadProgress

_MEGABYTE = 1024 * 1024
_BATCH_CHUNKS = 8
_PART_CHARACTERS = 256 * 1024
_CACHED_WINDOWS = 64


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame; None at the end of the stream."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head)) if len(head) == 4 else None


def write_frame(stream: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(4) + data)
    stream.flush()


def work(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Serve jobs until the end of stdin."""
    first = read_frame(stdin)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=ReaderSetup)
    model: Any = None
    if setup.embed:
        from antiphon.retrieval.local_model import LocalModel

        model = LocalModel()
    _limit_memory(setup.megabytes)
    write_frame(stdout, ReaderReady())
    while (frame := read_frame(stdin)) is not None:
        job = msgspec.msgpack.decode(frame, type=ReadJob)
        try:
            for progress in run_job(job, model):
                write_frame(stdout, progress)
            last = ReadProgress(is_last=True)
        except Unreadable as error:
            last = ReadProgress(is_last=True, code=error.code, message=error.message)
        except MemoryError:
            last = ReadProgress(is_last=True, code=INVALID, message="Reading the file needs too much memory.")
        write_frame(stdout, last)


def run_job(job: ReadJob, model: Any) -> Iterator[ReadProgress]:
    """Yield the chunks of a file, or the parts of its text."""
    # The signal ends the process, even inside a parser.
    signal.setitimer(signal.ITIMER_PROF, job.parse_seconds)
    text = extract_text(Path(job.path), job.filename, max_text_bytes=job.max_text_bytes)
    if not job.chunk_tokens:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for start in range(0, len(text), _PART_CHARACTERS):
            yield ReadProgress([ReadChunk(start, text[start : start + _PART_CHARACTERS])])
        return
    chunked = ChunkedText(text, model or EstimatingTokenizer())
    signal.setitimer(signal.ITIMER_PROF, 0)
    if len(chunked) > job.max_tokens:
        raise Unreadable(INVALID, f"The file has {len(chunked)} tokens. At most {job.max_tokens} are allowed.")
    embedder = None if model is None else _WindowEmbedder(model, chunked)
    batch: list[ReadChunk] = []
    for chunk in chunked.list_chunks(job.chunk_tokens, job.overlap_tokens):
        batch.append(ReadChunk(chunk.starts_at, chunk.text, embedder.embed(chunk) if embedder else b""))
        if len(batch) == _BATCH_CHUNKS:
            yield ReadProgress(batch)
            batch = []
    if batch:
        yield ReadProgress(batch)


class _WindowEmbedder:
    """Computes the vectors of chunks. Windows that overlapping chunks share are computed once."""

    def __init__(self, model: Any, chunked: ChunkedText) -> None:
        self._model = model
        self._chunked = chunked
        self._vectors: dict[tuple[int, int], bytes] = {}

    def embed(self, chunk: TextChunk) -> bytes:
        return b"".join(self._embed_window(*window) for window in chunk.windows)

    def _embed_window(self, start: int, end: int) -> bytes:
        vector = self._vectors.get((start, end))
        if vector is None:
            computed = self._model.embed_tokens(self._chunked.ids[start:end])
            vector = self._vectors[start, end] = computed.astype("<f2").tobytes()
            if len(self._vectors) > _CACHED_WINDOWS:
                del self._vectors[next(iter(self._vectors))]
        return vector


def _limit_memory(megabytes: int) -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        pages = 0
    if pages:
        limit = pages * resource.getpagesize() + megabytes * _MEGABYTE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    os.nice(5)
    work(sys.stdin.buffer, sys.stdout.buffer)
