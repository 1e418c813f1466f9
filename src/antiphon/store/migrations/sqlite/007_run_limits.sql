-- Shared limits on background runs. `run_starts` has one row for each run that began in the last minute, in any process.
-- It is written only while `starts_per_minute` is set.
CREATE TABLE run_starts (
    started_at REAL NOT NULL
);

CREATE INDEX run_starts_by_time ON run_starts (started_at);

-- A claim skips runs by project and by attempt. With both in the index it does not read the rows of skipped runs.
DROP INDEX waiting_runs;

CREATE INDEX waiting_runs ON runs (owner, place, project, attempt, model, home, free_since, cancelled)
WHERE owner IS NULL AND NOT cancelled;
