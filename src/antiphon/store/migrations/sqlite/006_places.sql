-- Places in a conversation that outlive what stood there. `deleted_items` has those of deleted items: a list can be gone
-- on with after one, and no later item gets a place before it. `blocks` has, for each response of a conversation, the last
-- place before it.
CREATE TABLE deleted_items (
    project TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    place INTEGER NOT NULL,
    item_id TEXT NOT NULL,
    PRIMARY KEY (project, conversation_id, place)
) WITHOUT ROWID;

CREATE TABLE blocks (
    project TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    response_id TEXT NOT NULL,
    place INTEGER NOT NULL,
    PRIMARY KEY (project, conversation_id, response_id)
) WITHOUT ROWID;

CREATE TRIGGER deleted_conversations_leave_no_places AFTER DELETE ON conversations
BEGIN
    DELETE FROM deleted_items WHERE project = old.project AND conversation_id = old.id;
    DELETE FROM blocks WHERE project = old.project AND conversation_id = old.id;
END;

-- Of what is there already, items tell: those that were made in a response by their ids, others by the notes of them. Only what is final
-- has been added.
INSERT INTO blocks
SELECT project, conversation_id, response_id, min(place) - 1 FROM (
    SELECT project, conversation_id, 'resp' || substr(item_id, instr(item_id, '_'), 45) AS response_id, place FROM items
    WHERE item_id IS NOT NULL
    UNION ALL
    SELECT items.project, conversation_id, response_id, place FROM foreign_items
    JOIN items ON items.project = foreign_items.project AND items.item_id = foreign_items.item_id
) AS made
WHERE EXISTS (SELECT 1 FROM responses WHERE responses.project = made.project AND responses.id = response_id AND final)
GROUP BY project, conversation_id, response_id;
