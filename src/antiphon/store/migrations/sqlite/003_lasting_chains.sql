-- A response that has expired is kept while a newer one continues it. `continued` is 1 once a sweep has found it so:
-- sweeps do not look at it again until one of those that continued it is gone. The column stands behind the large ones,
-- where no row has to be written anew for it: only sweeps read it.
ALTER TABLE responses ADD COLUMN continued INTEGER NOT NULL DEFAULT 0;

DROP INDEX expiring_responses;

CREATE INDEX expiring_responses ON responses (expires_at) WHERE expires_at IS NOT NULL AND continued = 0;

CREATE INDEX continuing_responses ON responses (project, previous_response_id) WHERE previous_response_id IS NOT NULL;

CREATE TRIGGER deleted_responses_continue_nothing AFTER DELETE ON responses
WHEN old.previous_response_id IS NOT NULL
BEGIN
    UPDATE responses SET continued = 0
    WHERE project = old.project AND id = old.previous_response_id AND continued = 1;
END;

CREATE TRIGGER changed_responses_continue_another AFTER UPDATE OF previous_response_id ON responses
WHEN old.previous_response_id IS NOT new.previous_response_id
BEGIN
    UPDATE responses SET continued = 0
    WHERE project = old.project AND id = old.previous_response_id AND continued = 1;
END;
