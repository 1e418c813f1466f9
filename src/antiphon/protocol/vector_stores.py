"""Vector stores, their files and batches, and the request bodies of their endpoints."""

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import Metadata
from antiphon.protocol.unions import Wire, always

StoreStatus: TypeAlias = Literal["in_progress", "completed", "expired"]
FileStatus: TypeAlias = Literal["in_progress", "completed", "cancelled", "failed"]
ErrorCode: TypeAlias = Literal["server_error", "unsupported_file", "invalid_file"]
AttributeValue: TypeAlias = Annotated[str, Meta(max_length=512)] | bool | int | float
Attributes: TypeAlias = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], AttributeValue], Meta(max_length=16)
]
MAX_STORE_FILES = 500
MAX_BATCH_FILES = 2000
MAX_QUERIES = 100
MAX_QUERY_LENGTH = 16_384
DEFAULT_CHUNK_TOKENS = 800
DEFAULT_OVERLAP_TOKENS = 400

StoreName: TypeAlias = Annotated[str, Meta(max_length=1024)]
Query: TypeAlias = Annotated[str, Meta(max_length=MAX_QUERY_LENGTH)]


class StaticChunking(Wire):
    max_chunk_size_tokens: Annotated[int, Meta(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.chunk_overlap_tokens * 2 > self.max_chunk_size_tokens:
            raise ValueError("Expected at most half of max_chunk_size_tokens - at `$.chunk_overlap_tokens`")


DEFAULT_CHUNKING = StaticChunking(DEFAULT_CHUNK_TOKENS, DEFAULT_OVERLAP_TOKENS)


class ChunkingRequest(Wire):
    """The chunking that a client chooses. `auto` means the default."""

    type: Literal["auto", "static"]
    static: StaticChunking | None = None

    def __post_init__(self) -> None:
        if self.type == "static" and self.static is None:
            raise ValueError("Object missing required field `static`")
        if self.type == "auto" and self.static is not None:
            raise ValueError("Expected no value, because `type` is auto - at `$.static`")

    @property
    def chosen(self) -> StaticChunking:
        return self.static or DEFAULT_CHUNKING


class Chunking(Wire):
    """The chunking of a file as responses show it."""

    static: StaticChunking
    type: Literal["static"] = always("static")


class StoreExpiry(Wire):
    """The expiry of a vector store, in days after it was last used."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Meta(ge=1, le=365)]


class CreateVectorStore(Wire, kw_only=True):
    """The body of `POST /v1/vector_stores`."""

    name: StoreName | None = None
    description: StoreName | None = None
    file_ids: Annotated[list[str], Meta(max_length=MAX_STORE_FILES)] | None = None
    chunking_strategy: ChunkingRequest | None = None
    expires_after: StoreExpiry | None = None
    metadata: Metadata | None = None


class UpdateVectorStore(Wire, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}`. Fields that are absent do not change."""

    name: StoreName | UnsetType | None = UNSET
    expires_after: StoreExpiry | UnsetType | None = UNSET
    metadata: Metadata | UnsetType | None = UNSET


class FileCounts(Wire):
    in_progress: int = always(0)
    completed: int = always(0)
    failed: int = always(0)
    cancelled: int = always(0)
    total: int = always(0)


class VectorStore(Wire, kw_only=True):
    id: str
    object: Literal["vector_store"] = always("vector_store")
    created_at: int
    name: str
    description: str | None = always(None)
    usage_bytes: int
    file_counts: FileCounts
    status: StoreStatus
    expires_after: StoreExpiry | None = always(None)
    expires_at: int | None = always(None)
    last_active_at: int | None
    metadata: Metadata | None = always(None)


class AttachFile(Wire, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/files`, and an entry of a batch."""

    file_id: str
    attributes: Attributes | None = None
    chunking_strategy: ChunkingRequest | None = None


class UpdateStoreFile(Wire, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/files/{file_id}`."""

    attributes: Attributes | None


class CreateFileBatch(Wire, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/file_batches`. Either `file_ids` or `files` is required."""

    file_ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_BATCH_FILES)] | None = None
    files: Annotated[list[AttachFile], Meta(min_length=1, max_length=MAX_BATCH_FILES)] | None = None
    attributes: Attributes | None = None
    chunking_strategy: ChunkingRequest | None = None


class FileError(Wire):
    code: ErrorCode
    message: str


class VectorStoreFile(Wire, kw_only=True):
    """A file in a vector store. Its id is the id of the file."""

    id: str
    object: Literal["vector_store.file"] = always("vector_store.file")
    created_at: int
    vector_store_id: str
    status: FileStatus
    usage_bytes: int
    last_error: FileError | None = always(None)
    attributes: Attributes | None = always(None)
    chunking_strategy: Chunking


class FileBatch(Wire, kw_only=True):
    id: str
    object: Literal["vector_store.files_batch"] = always("vector_store.files_batch")
    created_at: int
    vector_store_id: str
    status: FileStatus
    file_counts: FileCounts


class SearchRanking(Wire):
    """Options for the ranking of results. There is no re-ranking, so all values of `ranker` have the same effect."""

    ranker: Literal["none", "auto", "default-2024-11-15"] | None = None
    score_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None


class SearchVectorStore(Wire, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/search`."""

    query: Query | Annotated[list[Query], Meta(min_length=1, max_length=MAX_QUERIES)]
    max_num_results: Annotated[int, Meta(ge=1, le=50)] | None = None
    filters: JsonObject | None = None
    ranking_options: SearchRanking | None = None
    rewrite_query: bool | None = None


class TextContent(Wire):
    text: str
    type: Literal["text"] = always("text")


class SearchResult(Wire, kw_only=True):
    file_id: str
    filename: str
    score: float
    attributes: Attributes | None = always(None)
    content: list[TextContent]


class SearchPage(Wire, kw_only=True):
    """The results of a search. All of them are on one page."""

    object: Literal["vector_store.search_results.page"] = always("vector_store.search_results.page")
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool = always(False)
    next_page: str | None = always(None)


class FileContentPage(Wire, kw_only=True):
    """The text that was extracted from a file."""

    object: Literal["vector_store.file_content.page"] = always("vector_store.file_content.page")
    data: list[TextContent]
    has_more: bool = always(False)
    next_page: str | None = always(None)
