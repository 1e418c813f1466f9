-- API keys that the command line creates. `digest` is the SHA-256 of a key, `scopes` are separated by spaces.
CREATE TABLE api_keys (
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    digest bytea NOT NULL UNIQUE,
    project text COLLATE "C" NOT NULL,
    name text NOT NULL,
    scopes text NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint,
    revoked_at bigint,
    last_used_at bigint
);
