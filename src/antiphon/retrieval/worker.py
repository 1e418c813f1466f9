"""The process that reads files: it extracts their text, splits it into chunks, and computes vectors.

`antiphon.retrieval.process` starts it. A file that is too large or makes a parser crash ends only this process. Frames
on stdin and stdout are msgpack with a length of four bytes: first a `ReaderSetup`, then one `ReadJob` after the other.
Each job is answered by one or more `ReadProgress`. The process ends with its stdin.
"""

import itertools
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from antiphon.retrieval.chunking import ChunkedText, EstimatingTokenizer, TextChunk
from antiphon.retrieval.extract import INVALID, Unreadable, extract_text
from antiphon.retrieval.messages import ReadChunk, ReaderReady, ReaderSetup, ReadJob, ReadProgress
from antiphon.worker_frames import read_frame, write_frame

_MEGABYTE = 1024 * 1024
_BATCH_CHUNKS = 8
_PART_CHARACTERS = 256 * 1024
_CACHED_WINDOWS = 64
_MAX_THREADS = 8


def work(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Serve jobs until the end of stdin."""
    first = read_frame(stdin)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=ReaderSetup)
    model: Any = None
    if setup.embed:
        from antiphon.retrieval.local_model import LocalModel

        threads = min(_count_processors(), _MAX_THREADS)
        model = LocalModel(threads=threads)
        # The threads are started before the memory is limited.
        model.embed_all([[]] * threads)
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
        except OSError as error:  # the file has been deleted meanwhile, or its parser has raised it
            message = f"The file cannot be read: {error.strerror or type(error).__name__}."
            last = ReadProgress(is_last=True, code="server_error", message=message)
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
    chunks = chunked.list_chunks(job.chunk_tokens, job.overlap_tokens)
    while batch := list(itertools.islice(chunks, _BATCH_CHUNKS)):
        vectors = [b""] * len(batch) if embedder is None else embedder.embed(batch)
        yield ReadProgress(
            [ReadChunk(chunk.starts_at, chunk.text, found) for chunk, found in zip(batch, vectors, strict=True)]
        )


class _WindowEmbedder:
    """Computes the vectors of chunks. Windows that overlapping chunks share are computed once."""

    def __init__(self, model: Any, chunked: ChunkedText) -> None:
        self._model = model
        self._chunked = chunked
        self._vectors: dict[tuple[int, int], bytes] = {}

    def embed(self, chunks: Sequence[TextChunk]) -> list[bytes]:
        """Return the vectors of each chunk."""
        windows = dict.fromkeys(window for chunk in chunks for window in chunk.windows)
        missing = [window for window in windows if window not in self._vectors]
        computed = self._model.embed_all([self._chunked.ids[start:end] for start, end in missing])
        for window, vector in zip(missing, computed, strict=True):
            self._vectors[window] = vector.astype("<f2").tobytes()
        found = [b"".join(self._vectors[window] for window in chunk.windows) for chunk in chunks]
        for window in list(self._vectors)[:-_CACHED_WINDOWS]:
            del self._vectors[window]
        return found


def _count_processors() -> int:
    """Return the number of processors that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
