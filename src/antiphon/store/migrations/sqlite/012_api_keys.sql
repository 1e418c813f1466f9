-- API keys that the command line creates. `digest` is the SHA-256 of a key, `scopes` are separated by spaces.
CREATE TABLE api_keys (
    id TEXT NOT NULL PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    scopes TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    last_used_at INTEGER
) STRICT, WITHOUT ROWID;
