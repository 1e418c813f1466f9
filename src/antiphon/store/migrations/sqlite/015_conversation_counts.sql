-- The number of conversations of each project, so that a limit can be checked without counting them.
CREATE TABLE conversation_counts (
    project TEXT NOT NULL PRIMARY KEY,
    number INTEGER NOT NULL
) WITHOUT ROWID;

INSERT INTO conversation_counts (project, number) SELECT project, count(*) FROM conversations GROUP BY project;

CREATE TRIGGER counted_conversations AFTER INSERT ON conversations BEGIN
    INSERT INTO conversation_counts (project, number) VALUES (new.project, 1)
    ON CONFLICT (project) DO UPDATE SET number = number + 1;
END;

CREATE TRIGGER uncounted_conversations AFTER DELETE ON conversations BEGIN
    UPDATE conversation_counts SET number = number - 1 WHERE project = old.project;
END;
