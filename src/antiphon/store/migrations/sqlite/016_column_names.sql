-- The names that the columns have in PostgreSQL, so that both databases can execute the same statements. `position` orders
-- rows by their insertion. `configuration_id` is that of the process which enqueued a run. `configurations` has the time
-- until which a process with this configuration is known to be alive.
ALTER TABLE items RENAME COLUMN place TO position;

ALTER TABLE deleted_items RENAME COLUMN place TO position;

ALTER TABLE blocks RENAME COLUMN place TO position;

ALTER TABLE prompts RENAME COLUMN place TO position;

ALTER TABLE runs RENAME COLUMN place TO position;

ALTER TABLE runs RENAME COLUMN home TO configuration_id;

ALTER TABLE homes RENAME TO configurations;

ALTER TABLE configurations RENAME COLUMN home TO configuration_id;
