-- A claim takes runs of all projects in turns, so it reads the waiting runs by project.
DROP INDEX waiting_runs;

CREATE INDEX waiting_runs ON runs (owner, project, place, attempt, model, home, free_since, cancelled)
WHERE owner IS NULL AND NOT cancelled;
