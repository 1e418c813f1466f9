-- Responses that were deleted before they expired. A save that is repeated because its commit got no answer must not
-- create the response again. A save is repeated soon, so rows older than a day are deleted.
CREATE TABLE deletions (
    project text COLLATE "C" NOT NULL,
    response_id text COLLATE "C" NOT NULL,
    deleted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (project, response_id)
);

CREATE INDEX deletions_by_time ON deletions (deleted_at);

CREATE FUNCTION record_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO deletions (project, response_id) VALUES (old.project, old.id)
    ON CONFLICT (project, response_id) DO UPDATE SET deleted_at = excluded.deleted_at;
    DELETE FROM deletions WHERE (project, response_id) IN (
        SELECT project, response_id FROM deletions WHERE deleted_at < clock_timestamp() - interval '1 day'
        ORDER BY deleted_at LIMIT 10 FOR UPDATE SKIP LOCKED
    );
    RETURN NULL;
END
$$;

CREATE TRIGGER recorded_deletions AFTER DELETE ON responses FOR EACH ROW
WHEN (old.expires_at IS NULL OR old.expires_at > extract(epoch FROM clock_timestamp()))
EXECUTE FUNCTION record_deletion();
