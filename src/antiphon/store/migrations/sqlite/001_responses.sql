-- One row for each finished response. `input` and `output` are JSON arrays of items; `body` is the rest of the response
-- and stands last, so that walking a chain never reads its pages.
CREATE TABLE responses (
    project TEXT NOT NULL,
    id TEXT NOT NULL,
    previous_response_id TEXT,
    created_at NUMERIC NOT NULL,
    input BLOB NOT NULL,
    output BLOB NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (project, id)
);
