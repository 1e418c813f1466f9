-- Files, uploads, vector stores and their chunks. Contents of files are on disk, beside this database.

CREATE TABLE files (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    purpose TEXT NOT NULL,
    UNIQUE (project, id)
);

CREATE INDEX files_by_project ON files (project, position);

CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE uploads (
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    purpose TEXT NOT NULL,
    mime_type TEXT NOT NULL,
    file_seconds INTEGER,
    status TEXT NOT NULL,
    file_id TEXT,
    PRIMARY KEY (project, id)
);

CREATE INDEX uploads_by_expiry ON uploads (expires_at);

CREATE TABLE upload_parts (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    upload_id TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    UNIQUE (project, upload_id, id)
);

-- `revision` grows with every change of the searchable content. `embedding` is the id of the model of its vectors.
CREATE TABLE vector_stores (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_active_at INTEGER NOT NULL,
    name TEXT NOT NULL,
    description TEXT,
    metadata BLOB,
    expires_days INTEGER,
    embedding TEXT NOT NULL,
    is_expired INTEGER NOT NULL DEFAULT 0,
    revision INTEGER NOT NULL DEFAULT 0,
    UNIQUE (project, id)
);

CREATE INDEX vector_stores_by_project ON vector_stores (project, position);

-- Files of vector stores. Those in progress are the queue of the indexing.
CREATE TABLE entries (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    project TEXT NOT NULL,
    store_id TEXT NOT NULL,
    file_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    attributes BLOB,
    chunk_tokens INTEGER NOT NULL,
    overlap_tokens INTEGER NOT NULL,
    status TEXT NOT NULL,
    error_code TEXT,
    error_message TEXT,
    usage_bytes INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    leased_until REAL NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    UNIQUE (project, store_id, file_id)
);

CREATE INDEX entries_by_store ON entries (project, store_id, status, position, usage_bytes);

CREATE INDEX entries_by_file ON entries (project, file_id);

CREATE INDEX entries_in_progress ON entries (project, position) WHERE status = 'in_progress';

CREATE TABLE batches (
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    store_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    is_cancelled INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (project, id)
);

CREATE INDEX batches_by_store ON batches (project, store_id);

CREATE TABLE batch_files (
    project TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    file_id TEXT NOT NULL,
    PRIMARY KEY (project, batch_id, file_id)
) WITHOUT ROWID;

-- `entry` is the position of the entry, `starts_at` the offset in the text of the file. `vectors` has one or more
-- vectors of 16-bit floats.
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    entry INTEGER NOT NULL,
    starts_at INTEGER NOT NULL,
    scope TEXT NOT NULL,
    text TEXT NOT NULL,
    vectors BLOB NOT NULL
);

CREATE INDEX chunks_by_entry ON chunks (entry, id);

-- `scope` is the same for all chunks of a vector store, and different for others. Only completed entries are here.
CREATE VIRTUAL TABLE chunk_words USING fts5(
    scope, text, content = 'chunks', content_rowid = 'id', tokenize = 'porter unicode61 remove_diacritics 2'
);
