-- State that outlives a response. The two new columns of `responses` belong before its large ones, where a chain is
-- walked without reading past them, so the table is made anew. All that 001 kept were final.
ALTER TABLE responses RENAME TO responses_001;

CREATE TABLE responses (
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    previous_response_id TEXT,
    created_at NUMERIC NOT NULL,
    final INTEGER NOT NULL,
    expires_at INTEGER,
    input BLOB NOT NULL,
    output BLOB NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (project, id)
);

INSERT INTO responses
SELECT project, id, previous_response_id, created_at, 1, NULL, input, output, body FROM responses_001;

DROP TABLE responses_001;

CREATE INDEX expiring_responses ON responses (expires_at) WHERE expires_at IS NOT NULL;

-- `metadata` is JSON.
CREATE TABLE conversations (
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    metadata BLOB NOT NULL,
    PRIMARY KEY (project, id)
);

CREATE INDEX expiring_conversations ON conversations (expires_at) WHERE expires_at IS NOT NULL;

-- `place` orders the items of all conversations; an index ends with it, so each conversation is read in its order.
CREATE TABLE items (
    place INTEGER PRIMARY KEY,
    project TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    item_id TEXT,
    content BLOB NOT NULL
);

CREATE INDEX items_in_order ON items (project, conversation_id);

CREATE UNIQUE INDEX items_by_id ON items (project, item_id, conversation_id) WHERE item_id IS NOT NULL;

CREATE TRIGGER deleted_conversations_leave_no_items AFTER DELETE ON conversations
BEGIN
    DELETE FROM items WHERE project = old.project AND conversation_id = old.id;
END;

-- One row for each batch of events: their JSON, one to a line. `last` is the number of the last of them.
CREATE TABLE events (
    project TEXT NOT NULL,
    response_id TEXT NOT NULL,
    last INTEGER NOT NULL,
    lines BLOB NOT NULL,
    PRIMARY KEY (project, response_id, last)
);

-- Background runs that have not ended. `place` is their order of arrival; a run without an owner has no lease.
CREATE TABLE runs (
    place INTEGER PRIMARY KEY,
    project TEXT NOT NULL,
    response_id TEXT NOT NULL,
    owner TEXT,
    leased_until REAL,
    attempt INTEGER NOT NULL DEFAULT 0,
    watched INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    request BLOB NOT NULL,
    UNIQUE (project, response_id)
);

CREATE INDEX runs_by_owner ON runs (owner);

CREATE INDEX runs_by_lease ON runs (leased_until) WHERE leased_until IS NOT NULL;

CREATE INDEX unwanted_runs ON runs (cancelled) WHERE cancelled = 1;

-- A response that is saved for the first time has no run yet, so only updates have to look for one.
CREATE TRIGGER final_responses_do_not_run AFTER UPDATE ON responses WHEN new.final
BEGIN
    DELETE FROM runs WHERE project = new.project AND response_id = new.id;
END;

CREATE TRIGGER deleted_responses_leave_nothing AFTER DELETE ON responses
BEGIN
    DELETE FROM runs WHERE project = old.project AND response_id = old.id;
    DELETE FROM events WHERE project = old.project AND response_id = old.id;
END;

-- `place` is the order in which versions were saved.
CREATE TABLE prompts (
    place INTEGER PRIMARY KEY,
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    version TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (project, id, version)
);
