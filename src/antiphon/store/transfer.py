"""The export format of a store: JSON, one row per line, the same for all databases (docs/guides/postgresql.md).

The first line is a header, and the last one has the number of rows, so that a truncated file is noticed. Rows that only
speed up reading are not exported.
"""

import base64
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from antiphon.errors import ConfigError

FORMAT = 1

# Rows that are written to a database at once, unless they are large.
ROWS_STEP = 200

Kind = Literal["text", "integer", "number", "boolean", "json", "lines", "bytes"]


class Column(NamedTuple):
    """A column of a table. `json` and `lines` contain JSON, one text or one per line."""

    name: str
    kind: Kind = "text"


class Table(NamedTuple):
    """A table. Rows are exported in the order of `order`.

    `is_file_table`: it is in the database of files, which SQLite has in a file of its own. `rows_step` is the number of
    rows that are written at once.
    """

    name: str
    columns: Sequence[Column]
    order: str = "position"
    is_file_table: bool = False
    rows_step: int = ROWS_STEP


_PROJECT = Column("project")
_POSITION = Column("position", "integer")

TABLES = (
    Table(
        "responses",
        (
            _PROJECT,
            Column("id"),
            Column("previous_response_id"),
            Column("created_at", "number"),
            Column("final", "boolean"),
            Column("expires_at", "integer"),
            Column("input", "json"),
            Column("output", "json"),
            Column("body", "json"),
        ),
    ),
    Table("foreign_items", (_PROJECT, Column("response_id"), Column("item_id")), "project, response_id, item_id"),
    Table(
        "conversations",
        (
            _PROJECT,
            Column("id"),
            Column("created_at", "integer"),
            Column("expires_at", "integer"),
            Column("metadata", "json"),
        ),
        "project, id",
    ),
    Table(
        "items",
        (_PROJECT, Column("conversation_id"), _POSITION, Column("item_id"), Column("content", "json")),
        "position",
    ),
    Table(
        "deleted_items",
        (_PROJECT, Column("conversation_id"), _POSITION, Column("item_id")),
        "project, conversation_id, position",
    ),
    Table(
        "blocks",
        (_PROJECT, Column("conversation_id"), Column("response_id"), _POSITION),
        "project, conversation_id, response_id",
    ),
    Table(
        "events",
        (_PROJECT, Column("response_id"), Column("last", "integer"), Column("lines", "lines")),
        "project, response_id, last",
    ),
    Table(
        "prompts",
        (_PROJECT, Column("id"), Column("version"), Column("created_at", "integer"), Column("body", "bytes")),
    ),
    Table(
        "runs",
        (
            _PROJECT,
            Column("response_id"),
            Column("attempt", "integer"),
            Column("interruptions", "integer"),
            Column("watched", "boolean"),
            Column("cancelled", "boolean"),
            Column("model"),
            Column("configuration_id"),
            Column("free_since", "number"),
            Column("request", "bytes"),
        ),
    ),
    Table(
        "hosted_steps",
        (_PROJECT, Column("response_id"), Column("number", "integer"), Column("step", "bytes")),
        "project, response_id, number",
    ),
    Table(
        "api_keys",
        (
            Column("id"),
            Column("digest", "bytes"),
            _PROJECT,
            Column("name"),
            Column("scopes"),
            Column("created_at", "integer"),
            Column("expires_at", "integer"),
            Column("revoked_at", "integer"),
            Column("last_used_at", "integer"),
        ),
        "id",
    ),
    Table(
        "projects",
        (Column("id"), Column("name"), Column("created_at", "integer"), Column("archived_at", "integer")),
        "id",
    ),
    Table(
        "usage",
        (
            Column("started_at", "integer"),
            _PROJECT,
            Column("key_id"),
            Column("model"),
            Column("requests", "integer"),
            Column("input_tokens", "integer"),
            Column("cached_tokens", "integer"),
            Column("output_tokens", "integer"),
            Column("cost", "number"),
        ),
        "started_at, project, key_id, model",
    ),
    Table(
        "usage_months",
        (
            Column("month", "integer"),
            _PROJECT,
            Column("key_id"),
            Column("tokens", "integer"),
            Column("cost", "number"),
        ),
        "month, project, key_id",
    ),
    Table("effect_claims", (_PROJECT, Column("key"), Column("expires_at", "integer")), "project, key"),
)

_FILE_COLUMNS = (
    Column("filename"),
    Column("bytes", "integer"),
    Column("purpose"),
)
_CREATED_AT = Column("created_at", "integer")
_EXPIRES_AT = Column("expires_at", "integer")

CONTAINER_FILES = Table(
    "container_files",
    (
        _PROJECT,
        Column("container_id"),
        Column("id"),
        Column("path"),
        Column("bytes", "integer"),
        Column("source"),
        _CREATED_AT,
        Column("modified_ns", "integer"),
        Column("origin"),
        Column("content"),
    ),
    "project, container_id, id",
)
# Not a table of SQLite, where contents are files. A content has one row for each piece, and at least one.
CONTENTS = Table("contents", (Column("id"), Column("piece", "integer"), Column("data", "bytes")), "id, piece", True, 8)
CHUNKS = Table(
    "chunks",
    (
        Column("id", "integer"),
        Column("entry", "integer"),
        Column("starts_at", "integer"),
        Column("scope"),
        Column("text"),
        Column("vectors", "bytes"),
    ),
    "id",
    True,
)

# The files, vector stores and containers.
FILE_TABLES = (
    Table("files", (_POSITION, _PROJECT, Column("id"), _CREATED_AT, _EXPIRES_AT, *_FILE_COLUMNS), "position", True),
    Table(
        "uploads",
        (
            _PROJECT,
            Column("id"),
            _CREATED_AT,
            _EXPIRES_AT,
            *_FILE_COLUMNS,
            Column("mime_type"),
            Column("file_seconds", "integer"),
            Column("status"),
            Column("file_id"),
        ),
        "project, id",
        True,
    ),
    Table(
        "upload_parts",
        (_POSITION, _PROJECT, Column("upload_id"), Column("id"), _CREATED_AT, Column("bytes", "integer")),
        "position",
        True,
    ),
    Table(
        "vector_stores",
        (
            _POSITION,
            _PROJECT,
            Column("id"),
            _CREATED_AT,
            Column("last_active_at", "integer"),
            Column("name"),
            Column("description"),
            Column("metadata", "json"),
            Column("expires_days", "integer"),
            Column("embedding"),
            Column("is_expired", "integer"),
            Column("revision", "integer"),
        ),
        "position",
        True,
    ),
    Table(
        "entries",
        (
            _POSITION,
            _PROJECT,
            Column("store_id"),
            Column("file_id"),
            _CREATED_AT,
            Column("attributes", "json"),
            Column("chunk_tokens", "integer"),
            Column("overlap_tokens", "integer"),
            Column("status"),
            Column("error_code"),
            Column("error_message"),
            Column("usage_bytes", "integer"),
            Column("attempts", "integer"),
        ),
        "position",
        True,
    ),
    Table(
        "batches",
        (_PROJECT, Column("id"), Column("store_id"), _CREATED_AT, Column("is_cancelled", "integer")),
        "project, id",
        True,
    ),
    Table(
        "batch_files",
        (_PROJECT, Column("batch_id"), Column("file_id")),
        "project, batch_id, file_id",
        True,
    ),
    CHUNKS,
    Table(
        "containers",
        (
            _PROJECT,
            Column("id"),
            Column("name"),
            _CREATED_AT,
            Column("last_active_at", "integer"),
            Column("idle_seconds", "integer"),
            Column("memory_limit"),
            Column("interpreter"),
            Column("is_purged", "integer"),
        ),
        "project, id",
    ),
    CONTAINER_FILES,
    CONTENTS,
)
# The runs and sessions of agents, which SQLite has in the file of the ledger. Leases are not moved: no process holds a
# moved run. A run or session that the other database already has is left as it is.
RUN_TABLES = (
    Table(
        "agent_runs",
        (
            Column("run_id"),
            Column("created_at", "integer"),
            Column("updated_at", "integer"),
            Column("active_at", "number"),
            Column("status"),
            Column("title"),
        ),
    ),
    Table("agent_entries", (Column("run_id"), Column("number", "integer"), Column("entry", "bytes")), "run_id, number"),
)
SESSION_TABLES = (
    Table("agent_sessions", (Column("session_id"), Column("active_at", "number")), "session_id"),
    Table(
        "agent_session_items",
        (
            Column("session_id"),
            Column("run_number", "integer"),
            Column("number", "integer"),
            Column("run_id"),
            Column("item", "json"),
        ),
        "session_id, run_number, number",
    ),
)
AGENT_TABLES = RUN_TABLES + SESSION_TABLES
ALL_TABLES = TABLES + FILE_TABLES + AGENT_TABLES

_TABLES = {table.name: table for table in ALL_TABLES}


class TransferStore(Protocol):
    """A database that can be exported and imported."""

    async def read_schema(self) -> tuple[int, int]:
        """Return the version of the schema, 0 if there is none, and the version that this program needs."""

    async def describe(self) -> dict[str, Any]:
        """Return facts about the database: its schema version and the number of rows of its tables."""

    def export_rows(self, table: Table) -> AsyncIterator[Sequence[Any]]:
        """Yield the rows of a table. All tables are read at the same state."""

    async def import_rows(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Write rows, in the transaction of the whole import."""


async def export_lines(store: TransferStore) -> AsyncIterator[bytes]:
    """Yield the lines of an export."""
    yield _encode_line({"antiphon_export": FORMAT})
    counts: dict[str, int] = {}
    for table in ALL_TABLES:
        count = 0
        async for row in store.export_rows(table):
            count += 1
            yield _encode_row(table, row)
        counts[table.name] = count
    yield _encode_line({"end": counts})


async def import_lines(store: TransferStore, lines: Iterator[bytes]) -> dict[str, int]:
    """Write the rows of an export to an empty database. Return the number of rows by table.

    Raises ConfigError for a line that is not part of an export, and if the end is missing.
    """
    counts = dict.fromkeys(_TABLES, 0)
    _check_header(next(lines, b""))
    waiting: list[Sequence[Any]] = []
    current: Table | None = None
    for number, line in enumerate(lines, start=2):
        fields = _decode_line(number, line)
        if "end" in fields:
            if current is not None:
                await store.import_rows(current, waiting)
            _check_end(number, fields["end"], counts)
            if any(rest.strip() for rest in lines):
                raise ConfigError(f"line {number}: more lines follow the end of the export. Nothing was imported.")
            return counts
        table, row = _decode_row(number, fields)
        if current is not None and (table is not current or len(waiting) >= current.rows_step):
            await store.import_rows(current, waiting)
            waiting = []
        current = table
        waiting.append(row)
        counts[table.name] += 1
    raise ConfigError("The file is incomplete: its last line is missing. Nothing was imported.")


def _check_header(line: bytes) -> None:
    header = _decode_line(1, line) if line.strip() else {}
    if "antiphon_export" not in header:
        raise ConfigError("line 1: this is not an export of Antiphon.")
    version = msgspec.json.decode(header["antiphon_export"])
    if version != FORMAT:
        raise ConfigError(f"line 1: the file has format {version}, but this version of Antiphon reads format {FORMAT}.")


def _check_end(number: int, end: msgspec.Raw, counts: Mapping[str, int]) -> None:
    expected = _decode_json(number, "end", end, dict[str, int])
    for name in {**counts, **expected}:  # older exports have fewer tables
        if counts.get(name, 0) != expected.get(name, 0):
            raise ConfigError(
                f"line {number}: the file has {counts.get(name, 0)} rows of {name}, but its end says "
                f"{expected.get(name, 0)}. Nothing was imported."
            )


def _encode_row(table: Table, row: Sequence[Any]) -> bytes:
    fields: dict[str, Any] = {"table": table.name}
    for column, value in zip(table.columns, row, strict=True):
        if value is not None:
            name, encoded = _encode_value(column, value)
            fields[name] = encoded
    return _encode_line(fields)


def _encode_value(column: Column, value: Any) -> tuple[str, Any]:
    """Return the name and the value of a field. Damaged JSON is encoded like bytes, so that nothing is lost."""
    if column.kind == "boolean":
        return column.name, bool(value)
    if column.kind == "number" and isinstance(value, float) and value.is_integer():
        return column.name, int(value)
    if column.kind == "json" and _is_json(value):
        return column.name, msgspec.Raw(value)
    if column.kind == "lines" and isinstance(value, bytes):
        lines = value.split(b"\n")
        if all(_is_json(line) for line in lines):
            return column.name, [msgspec.Raw(line) for line in lines]
    if isinstance(value, bytes):
        return f"{column.name}_base64", base64.b64encode(value).decode()
    return column.name, value


def _is_json(value: Any) -> bool:
    try:
        msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return False
    return True


def _encode_line(fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


def _decode_line(number: int, line: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError) as error:
        if not line.endswith(b"\n"):
            raise ConfigError(f"The file is incomplete: line {number} has no end. Nothing was imported.") from None
        raise ConfigError(f"line {number}: {error}. Nothing was imported.") from None


def _decode_row(number: int, fields: dict[str, msgspec.Raw]) -> tuple[Table, Sequence[Any]]:
    name = _decode_json(number, "table", fields.pop("table", msgspec.Raw(b'""')), str)
    table = _TABLES.get(name)
    if table is None:
        raise ConfigError(f"line {number}: there is no table {name!r}. Known tables: {', '.join(_TABLES)}.")
    row = [_decode_value(number, column, fields) for column in table.columns]
    if fields:
        raise ConfigError(f"line {number}: the table {table.name} has no field {next(iter(fields))!r}.")
    return table, row


_TYPES: dict[Kind, Any] = {"text": str, "integer": int, "number": float | int, "boolean": bool}


def _decode_value(number: int, column: Column, fields: dict[str, msgspec.Raw]) -> Any:
    encoded = fields.pop(f"{column.name}_base64", None)
    try:
        if encoded is not None:
            return base64.b64decode(msgspec.json.decode(encoded, type=str), validate=True)
        raw = fields.pop(column.name, None)
        if raw is None:
            return None
        if column.kind == "json":
            return bytes(raw)
        if column.kind == "lines":
            return b"\n".join(bytes(each) for each in msgspec.json.decode(raw, type=list[msgspec.Raw]))
        return msgspec.json.decode(raw, type=_TYPES.get(column.kind, Any))
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"line {number}: {column.name}: {error}. Nothing was imported.") from None


def _decode_json(number: int, name: str, raw: msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"line {number}: {name}: {error}. Nothing was imported.") from None
