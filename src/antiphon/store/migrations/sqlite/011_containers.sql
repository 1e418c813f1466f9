-- Containers of the code interpreter and their files. The contents of the files are beside the store.
-- Ids begin with the time, so their order is the order of creation.
CREATE TABLE containers (
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_active_at INTEGER NOT NULL,
    idle_seconds INTEGER NOT NULL,
    memory_limit TEXT NOT NULL,
    interpreter TEXT,
    is_purged INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (project, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX containers_by_activity ON containers (is_purged, last_active_at);

CREATE TABLE container_files (
    project TEXT NOT NULL,
    container_id TEXT NOT NULL,
    id TEXT NOT NULL,
    path TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    source TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    modified_ns INTEGER NOT NULL,
    origin TEXT,
    PRIMARY KEY (project, container_id, id)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX container_files_by_path ON container_files (project, container_id, path);
