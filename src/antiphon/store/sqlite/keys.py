"""API keys in SQLite."""

from typing import Any

from antiphon.store.keys import StoredKey
from antiphon.store.sqlite.database import Database

COLUMNS = "id, digest, project, name, scopes, created_at, expires_at, revoked_at, last_used_at"

SAVE = f"INSERT INTO api_keys ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

FIND = f"SELECT {COLUMNS} FROM api_keys WHERE digest = ?"

LIST = f"SELECT {COLUMNS} FROM api_keys ORDER BY created_at, id"

EXISTS = "SELECT EXISTS (SELECT 1 FROM api_keys)"

REVOKE = "UPDATE api_keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"

ROTATE = "UPDATE api_keys SET digest = ?, expires_at = ? WHERE id = ? AND revoked_at IS NULL"

RECORD_USE = "UPDATE api_keys SET last_used_at = ? WHERE id = ? AND (last_used_at IS NULL OR last_used_at <= ?)"


class SqliteKeys(Database):
    async def save_key(self, key: StoredKey) -> None:
        await self._writer.submit(SAVE, (*key[:4], " ".join(key.scopes), *key[5:]))

    async def find_key(self, digest: bytes) -> StoredKey | None:
        rows = await self._reader.submit(FIND, (digest,))
        return _read_key(rows[0]) if rows else None

    async def list_keys(self) -> list[StoredKey]:
        return [_read_key(row) for row in await self._reader.submit(LIST, ())]

    async def has_keys(self) -> bool:
        ((exists,),) = await self._reader.submit(EXISTS, ())
        return bool(exists)

    async def revoke_key(self, key_id: str, revoked_at: int) -> bool:
        revoked: int = await self._writer.submit(REVOKE, (revoked_at, key_id))
        return revoked > 0

    async def rotate_key(self, key_id: str, digest: bytes, expires_at: int | None) -> bool:
        rotated: int = await self._writer.submit(ROTATE, (digest, expires_at, key_id))
        return rotated > 0

    async def record_key_use(self, key_id: str, used_at: int, *, interval: int) -> None:
        await self._writer.submit(RECORD_USE, (used_at, key_id, used_at - interval))


def _read_key(row: tuple[Any, ...]) -> StoredKey:
    key = StoredKey(*row)
    return key._replace(scopes=tuple(row[4].split()))
