-- Projects that the admin API created, renamed or archived. Others exist by their keys only.
CREATE TABLE projects (
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    name text NOT NULL,
    created_at bigint NOT NULL,
    archived_at bigint
);

-- The usage of a minute, or of an hour once it is two days old. `started_at` is its first second.
CREATE TABLE usage (
    started_at bigint NOT NULL,
    project text COLLATE "C" NOT NULL,
    key_id text COLLATE "C" NOT NULL,
    model text COLLATE "C" NOT NULL,
    requests bigint NOT NULL,
    input_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    cost double precision NOT NULL,
    PRIMARY KEY (started_at, project, key_id, model)
);

-- The usage of a calendar month in UTC, for budgets. `month` is its first second.
CREATE TABLE usage_months (
    month bigint NOT NULL,
    project text COLLATE "C" NOT NULL,
    key_id text COLLATE "C" NOT NULL,
    tokens bigint NOT NULL,
    cost double precision NOT NULL,
    PRIMARY KEY (month, project, key_id)
);

-- The counts of rate limits of each process: the last minute, and the responses in progress.
CREATE TABLE limit_counts (
    subject text COLLATE "C" NOT NULL,
    node text COLLATE "C" NOT NULL,
    requests bigint NOT NULL,
    tokens bigint NOT NULL,
    concurrent bigint NOT NULL,
    updated_at double precision NOT NULL,
    PRIMARY KEY (subject, node)
);
