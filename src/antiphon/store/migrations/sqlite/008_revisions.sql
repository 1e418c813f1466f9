-- The revision of a project changes when one of its final responses is changed or deleted. A process may cache final
-- responses that it has read as long as the revision stays the same. Projects without a row have revision 0.
CREATE TABLE revisions (
    project TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TRIGGER deleted_responses_change_the_revision AFTER DELETE ON responses WHEN old.final
BEGIN
    INSERT INTO revisions (project, revision) VALUES (old.project, 1)
    ON CONFLICT (project) DO UPDATE SET revision = revision + 1;
END;

CREATE TRIGGER changed_responses_change_the_revision
AFTER UPDATE OF project, id, previous_response_id, final, input, output, body ON responses WHEN old.final
BEGIN
    INSERT INTO revisions (project, revision) VALUES (old.project, 1)
    ON CONFLICT (project) DO UPDATE SET revision = revision + 1;
END;
