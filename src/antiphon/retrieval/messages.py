"""The messages between the server and the process that reads files."""

from msgspec import Struct


class ReaderSetup(Struct):
    """The limits of the process. With `embed`, it computes the vectors of chunks with the local model."""

    megabytes: int
    embed: bool


class ReadJob(Struct):
    """A file to read. Without `chunk_tokens`, only its text is returned."""

    path: str
    filename: str
    chunk_tokens: int
    overlap_tokens: int
    parse_seconds: float
    max_text_bytes: int
    max_tokens: int


class ReadChunk(Struct):
    """A part of the text. `vectors` are vectors of 16-bit floats, or empty if the process does not embed."""

    starts_at: int
    text: str
    vectors: bytes = b""


class ReadProgress(Struct):
    """Chunks of a job, or parts of a text. `is_last`: the job is done, with an error if `code` is not empty."""

    chunks: list[ReadChunk] = []
    is_last: bool = False
    code: str = ""
    message: str = ""


class ReaderReady(Struct):
    """The process has started."""
