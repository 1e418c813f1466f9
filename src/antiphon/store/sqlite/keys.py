"""API keys in SQLite."""

from antiphon.store.sql_keys import KEY_COLUMNS, KeyStatements, SqlKeys
from antiphon.store.sqlite.database import Database

SAVE = f"INSERT INTO api_keys ({KEY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

FIND = f"SELECT {KEY_COLUMNS} FROM api_keys WHERE digest = ?"

LIST = f"SELECT {KEY_COLUMNS} FROM api_keys ORDER BY created_at, id"

EXISTS = "SELECT EXISTS (SELECT 1 FROM api_keys)"

REVOKE = "UPDATE api_keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"

ROTATE = "UPDATE api_keys SET digest = ?, expires_at = ? WHERE id = ? AND revoked_at IS NULL"

RECORD_USE = "UPDATE api_keys SET last_used_at = ? WHERE id = ? AND (last_used_at IS NULL OR last_used_at <= ?)"


class SqliteKeys(Database, SqlKeys):
    _key_statements = KeyStatements(
        save=SAVE, find=FIND, list=LIST, exists=EXISTS, revoke=REVOKE, rotate=ROTATE, record_use=RECORD_USE
    )
