"""API keys in PostgreSQL."""

from antiphon.store.postgres.database import PostgresDatabase
from antiphon.store.postgres.writer import GroupedStatement
from antiphon.store.sql_keys import KEY_COLUMNS, KeyStatements, SqlKeys

SAVE = GroupedStatement(
    f"""
WITH saved AS (INSERT INTO api_keys ({KEY_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) RETURNING 1)
SELECT count(*) FROM saved
"""
)

FIND = f"SELECT {KEY_COLUMNS} FROM api_keys WHERE digest = $1"

LIST = f"SELECT {KEY_COLUMNS} FROM api_keys ORDER BY created_at, id"

EXISTS = "SELECT EXISTS (SELECT 1 FROM api_keys)"

REVOKE = GroupedStatement(
    """
WITH revoked AS (UPDATE api_keys SET revoked_at = $1 WHERE id = $2 AND revoked_at IS NULL RETURNING 1)
SELECT count(*) FROM revoked
"""
)

ROTATE = GroupedStatement(
    """
WITH rotated AS (
    UPDATE api_keys SET digest = $1, expires_at = $2 WHERE id = $3 AND revoked_at IS NULL RETURNING 1
)
SELECT count(*) FROM rotated
"""
)

RECORD_USE = GroupedStatement(
    """
WITH recorded AS (
    UPDATE api_keys SET last_used_at = $1 WHERE id = $2 AND (last_used_at IS NULL OR last_used_at <= $3) RETURNING 1
)
SELECT count(*) FROM recorded
"""
)


class PostgresKeys(PostgresDatabase, SqlKeys):
    _key_statements = KeyStatements(
        save=SAVE, find=FIND, list=LIST, exists=EXISTS, revoke=REVOKE, rotate=ROTATE, record_use=RECORD_USE
    )
