-- The process that runs code in a container, and the id of the content of a file, if it is not a file on disk.
ALTER TABLE containers ADD COLUMN runner TEXT;

ALTER TABLE containers ADD COLUMN running_until REAL NOT NULL DEFAULT 0;

ALTER TABLE container_files ADD COLUMN content TEXT;
