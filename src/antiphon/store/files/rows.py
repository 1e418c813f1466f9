"""The rows of files, uploads and vector stores."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from antiphon.errors import AntiphonError
from antiphon.protocol.files import UploadStatus
from antiphon.protocol.vector_stores import Attributes, ErrorCode, FileStatus


class IndexingLost(AntiphonError):
    """The writer does not own the entry: it was deleted or cancelled, or another process claimed it."""


class FileRow(NamedTuple):
    """A file. Its content is on disk under its id."""

    id: str
    created_at: int
    expires_at: int | None
    filename: str
    bytes: int
    purpose: str


class UploadRow(NamedTuple):
    """An upload. `file_seconds` is the time after which its file expires, and `file_id` the completed file."""

    id: str
    created_at: int
    expires_at: int
    filename: str
    bytes: int
    purpose: str
    mime_type: str
    file_seconds: int | None
    status: UploadStatus
    file_id: str | None = None


class PartRow(NamedTuple):
    id: str
    created_at: int
    bytes: int


class StoreRow(NamedTuple):
    """A vector store. `embedding` is the id of the model of its vectors.

    `revision` changes with its searchable content, `scope` is its key in the text index.
    """

    id: str
    created_at: int
    last_active_at: int
    name: str
    description: str | None
    metadata: dict[str, str] | None
    expires_days: int | None
    embedding: str
    is_expired: bool = False
    revision: int = 0
    scope: str = ""


class Tally(NamedTuple):
    """The numbers of entries by status, and the size of their chunks."""

    counts: dict[str, int]
    usage_bytes: int = 0


class NewEntry(NamedTuple):
    """A file to add to a vector store."""

    file_id: str
    attributes: Attributes | None
    chunk_tokens: int
    overlap_tokens: int


class EntryRow(NamedTuple):
    """A file of a vector store. `position` identifies the entry: a file that is added again gets a new one."""

    position: int
    file_id: str
    created_at: int
    attributes: Attributes | None
    chunk_tokens: int
    overlap_tokens: int
    status: FileStatus
    error_code: ErrorCode | None
    error_message: str | None
    usage_bytes: int


class BatchRow(NamedTuple):
    id: str
    store_id: str
    created_at: int
    is_cancelled: bool


class IndexingJob(NamedTuple):
    """An entry claimed for indexing. `attempts` counts this claim too. `embedding` is the vector store's model."""

    position: int
    project: str
    store_id: str
    file_id: str
    filename: str
    bytes: int
    chunk_tokens: int
    overlap_tokens: int
    attempts: int
    embedding: str


class ChunkRow(NamedTuple):
    """A chunk of a file's text. `vectors` has one or more vectors of 16-bit floats, concatenated."""

    starts_at: int
    text: str
    vectors: bytes


class VectorRow(NamedTuple):
    """The vectors of a chunk."""

    chunk_id: int
    vectors: bytes


class SearchEntry(NamedTuple):
    """A completed file of a vector store, as a search needs it."""

    position: int
    file_id: str
    filename: str
    attributes: Attributes | None


class TextMatch(NamedTuple):
    """A chunk with words of the query. A higher `rank` is better."""

    chunk_id: int
    rank: float


class VectorQuery(NamedTuple):
    """A search for the chunks of some entries. `text_scores` are the scores of matching words, by chunk."""

    vector: Sequence[float]
    text_scores: Mapping[int, float]
    entries: Sequence[int]
    embedding_weight: float
    text_weight: float
    threshold: float
    limit: int
