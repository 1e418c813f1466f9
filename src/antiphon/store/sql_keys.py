"""API keys in a table, shared by the SQL stores. Each has its own statements."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from antiphon.store.keys import StoredKey
from antiphon.store.sql_work import SqlDatabase

KEY_COLUMNS = "id, digest, project, name, scopes, created_at, expires_at, revoked_at, last_used_at"


class KeyStatements(NamedTuple):
    """The statements of `SqlKeys`. The rows of `find` and `list` have the `KEY_COLUMNS`."""

    save: Any
    find: str
    list: str
    exists: str
    revoke: Any
    rotate: Any
    record_use: Any


class SqlKeys(SqlDatabase):
    """Base of the classes that store API keys by SQL."""

    _key_statements: KeyStatements

    async def save_key(self, key: StoredKey) -> None:
        await self._writer.submit(self._key_statements.save, (*key[:4], " ".join(key.scopes), *key[5:]))

    async def find_key(self, digest: bytes) -> StoredKey | None:
        rows = await self._reader.submit(self._key_statements.find, (digest,))
        return _read_key(rows[0]) if rows else None

    async def list_keys(self) -> list[StoredKey]:
        return [_read_key(row) for row in await self._reader.submit(self._key_statements.list, ())]

    async def has_keys(self) -> bool:
        ((exists,),) = await self._reader.submit(self._key_statements.exists, ())
        return bool(exists)

    async def revoke_key(self, key_id: str, revoked_at: int) -> bool:
        revoked: int = await self._writer.submit(self._key_statements.revoke, (revoked_at, key_id))
        return revoked > 0

    async def rotate_key(self, key_id: str, digest: bytes, expires_at: int | None) -> bool:
        rotated: int = await self._writer.submit(self._key_statements.rotate, (digest, expires_at, key_id))
        return rotated > 0

    async def record_key_use(self, key_id: str, used_at: int, *, interval: int) -> None:
        await self._writer.submit(self._key_statements.record_use, (used_at, key_id, used_at - interval))


def _read_key(row: Sequence[Any]) -> StoredKey:
    key = StoredKey(*row)
    return key._replace(scopes=tuple(row[4].split()))
