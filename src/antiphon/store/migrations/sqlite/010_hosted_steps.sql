-- The finished steps of background responses with hosted tools, as JSON. An attempt that takes over continues after them.
CREATE TABLE hosted_steps (
    project TEXT NOT NULL,
    response_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    step BLOB NOT NULL,
    PRIMARY KEY (project, response_id, number)
) WITHOUT ROWID;

CREATE TRIGGER ended_runs_leave_no_hosted_steps AFTER DELETE ON runs
BEGIN
    DELETE FROM hosted_steps WHERE project = old.project AND response_id = old.response_id;
END;

-- Effects that happen at most once, such as an approved call. A claim is deleted when it expires.
CREATE TABLE effect_claims (
    project TEXT NOT NULL,
    key TEXT NOT NULL,
    expires_at INTEGER,
    PRIMARY KEY (project, key)
) WITHOUT ROWID;

CREATE INDEX expiring_effect_claims ON effect_claims (expires_at) WHERE expires_at IS NOT NULL;
