-- Projects that the admin API created, renamed or archived. Others exist by their keys only.
CREATE TABLE projects (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    archived_at INTEGER
) STRICT, WITHOUT ROWID;

-- The usage of a minute, or of an hour once it is two days old. `started_at` is its first second.
CREATE TABLE usage (
    started_at INTEGER NOT NULL,
    project TEXT NOT NULL,
    key_id TEXT NOT NULL,
    model TEXT NOT NULL,
    requests INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    cost REAL NOT NULL,
    PRIMARY KEY (started_at, project, key_id, model)
) STRICT, WITHOUT ROWID;

-- The usage of a calendar month in UTC, for budgets. `month` is its first second.
CREATE TABLE usage_months (
    month INTEGER NOT NULL,
    project TEXT NOT NULL,
    key_id TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    cost REAL NOT NULL,
    PRIMARY KEY (month, project, key_id)
) STRICT, WITHOUT ROWID;

-- The counts of rate limits of each process: the last minute, and the responses in progress.
CREATE TABLE limit_counts (
    subject TEXT NOT NULL,
    node TEXT NOT NULL,
    requests INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    concurrent INTEGER NOT NULL,
    updated_at REAL NOT NULL,
    PRIMARY KEY (subject, node)
) STRICT, WITHOUT ROWID;
