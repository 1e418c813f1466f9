-- What processes that share a queue know of each other's runs. `interruptions` counts the attempts that were not ended in
-- good order; `lease` is how long the lease was meant to last; `model` is what the response names, `home` the process that
-- has queued it. `free_since` is when a run was last queued or given back, or when the lease of its last owner ran out: it
-- is read of runs without an owner, and old ones have waited long enough for anyone.
ALTER TABLE runs ADD COLUMN interruptions INTEGER NOT NULL DEFAULT 0;

ALTER TABLE runs ADD COLUMN lease REAL NOT NULL DEFAULT 3600;

ALTER TABLE runs ADD COLUMN model TEXT NOT NULL DEFAULT '';

ALTER TABLE runs ADD COLUMN home TEXT NOT NULL DEFAULT '';

ALTER TABLE runs ADD COLUMN free_since REAL NOT NULL DEFAULT 0;

-- Until when the processes that queue runs under a home are taken to be alive: their runs are not left to others.
CREATE TABLE homes (
    home TEXT NOT NULL PRIMARY KEY,
    alive_until REAL NOT NULL
) WITHOUT ROWID;

-- The columns stand behind the large one: the queue is looked through without reading past it. A run is in one of the two
-- indexes, so that queueing it costs no more.
DROP INDEX runs_by_owner;

CREATE INDEX runs_by_owner ON runs (owner) WHERE owner IS NOT NULL;

CREATE INDEX waiting_runs ON runs (owner, place, model, home, free_since, cancelled)
WHERE owner IS NULL AND NOT cancelled;
