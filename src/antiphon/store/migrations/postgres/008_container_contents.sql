-- The content of a file of a container is deleted with the file.
CREATE FUNCTION delete_container_content() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM contents WHERE id = old.content
        AND NOT EXISTS (SELECT 1 FROM container_files WHERE content = old.content);
    RETURN NULL;
END
$$;

-- Deferred, because a file that is saved again is deleted and inserted.
CREATE CONSTRAINT TRIGGER deleted_container_files AFTER DELETE ON container_files
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (old.content IS NOT NULL) EXECUTE FUNCTION delete_container_content();
