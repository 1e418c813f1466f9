-- The number of conversations of each project, so that a limit can be checked without counting them.
CREATE TABLE conversation_counts (
    project text COLLATE "C" PRIMARY KEY,
    number bigint NOT NULL
);

INSERT INTO conversation_counts (project, number) SELECT project, count(*) FROM conversations GROUP BY project;

CREATE FUNCTION count_conversations() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO conversation_counts AS counts (project, number) VALUES (new.project, 1)
        ON CONFLICT (project) DO UPDATE SET number = counts.number + 1;
    ELSE
        UPDATE conversation_counts SET number = number - 1 WHERE project = old.project;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER counted_conversations AFTER INSERT OR DELETE ON conversations
FOR EACH ROW EXECUTE FUNCTION count_conversations();
