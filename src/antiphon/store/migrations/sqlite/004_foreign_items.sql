-- Items of responses whose ids do not lead to their response, because they were made elsewhere: most responses have none.
CREATE TABLE foreign_items (
    project TEXT NOT NULL,
    response_id TEXT NOT NULL,
    item_id TEXT NOT NULL,
    PRIMARY KEY (project, response_id, item_id)
) WITHOUT ROWID;

CREATE INDEX foreign_items_by_id ON foreign_items (project, item_id);

CREATE TRIGGER deleted_responses_leave_no_foreign_items AFTER DELETE ON responses
BEGIN
    DELETE FROM foreign_items WHERE project = old.project AND response_id = old.id;
END;

-- Whoever changes a response's items notes the new ones.
CREATE TRIGGER changed_responses_leave_no_foreign_items AFTER UPDATE OF output ON responses
BEGIN
    DELETE FROM foreign_items WHERE project = old.project AND response_id = old.id;
END;
