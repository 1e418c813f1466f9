-- The owner, if it held an advisory lock that ends with its connection when it claimed the run or checked the lock. An
-- earlier owner does not count: programs of earlier versions leave it.
ALTER TABLE runs ADD COLUMN locked_owner text COLLATE "C";
