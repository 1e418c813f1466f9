-- The finished steps of background responses with hosted tools, as JSON. An attempt that takes over continues after them.
CREATE TABLE hosted_steps (
    project text COLLATE "C" NOT NULL,
    response_id text COLLATE "C" NOT NULL,
    number integer NOT NULL,
    step bytea NOT NULL,
    PRIMARY KEY (project, response_id, number)
);

CREATE FUNCTION delete_hosted_steps() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM hosted_steps WHERE project = old.project AND response_id = old.response_id;
    RETURN NULL;
END
$$;

CREATE TRIGGER deleted_runs AFTER DELETE ON runs FOR EACH ROW EXECUTE FUNCTION delete_hosted_steps();

-- Effects that happen at most once, such as an approved call. A claim is deleted when it expires.
CREATE TABLE effect_claims (
    project text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    expires_at bigint,
    PRIMARY KEY (project, key)
);

CREATE INDEX expiring_effect_claims ON effect_claims (expires_at) WHERE expires_at IS NOT NULL;
