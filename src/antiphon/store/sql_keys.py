"""API keys in a table, shared by the SQL stores."""

from collections.abc import Sequence
from typing import Any

from antiphon.store.keys import StoredKey
from antiphon.store.object_limits import check_number
from antiphon.store.sql_steps import Lock, SqlStep, StepDatabase, Steps

_COLUMNS = "id, digest, project, name, scopes, created_at, expires_at, revoked_at, last_used_at"

SAVE = f"INSERT INTO api_keys ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
COUNT = "SELECT count(*) FROM api_keys WHERE project = ? AND revoked_at IS NULL"
FIND = f"SELECT {_COLUMNS} FROM api_keys WHERE digest = ?"
LIST = f"SELECT {_COLUMNS} FROM api_keys ORDER BY created_at, id"
EXISTS = "SELECT EXISTS (SELECT 1 FROM api_keys)"
REVOKE = "UPDATE api_keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
ROTATE = "UPDATE api_keys SET digest = ?, expires_at = ? WHERE id = ? AND revoked_at IS NULL"
RECORD_USE = "UPDATE api_keys SET last_used_at = ? WHERE id = ? AND (last_used_at IS NULL OR last_used_at <= ?)"


class SqlKeys(StepDatabase):
    """Base of the classes that store API keys by SQL."""

    async def save_key(self, key: StoredKey) -> None:
        await self._write(_save, key, self._limits.max_keys)

    async def find_key(self, digest: bytes) -> StoredKey | None:
        rows = await self._fetch(FIND, (digest,))
        return _read_key(rows[0]) if rows else None

    async def list_keys(self) -> list[StoredKey]:
        return [_read_key(row) for row in await self._fetch(LIST, ())]

    async def has_keys(self) -> bool:
        ((exists,),) = await self._fetch(EXISTS, ())
        return bool(exists)

    async def revoke_key(self, key_id: str, revoked_at: int) -> bool:
        return await self._change(REVOKE, (revoked_at, key_id)) > 0

    async def rotate_key(self, key_id: str, digest: bytes, expires_at: int | None) -> bool:
        return await self._change(ROTATE, (digest, expires_at, key_id)) > 0

    async def record_key_use(self, key_id: str, used_at: int, *, interval: int) -> None:
        await self._change(RECORD_USE, (used_at, key_id, used_at - interval))


def _save(key: StoredKey, max_keys: int) -> Steps[None]:
    yield Lock(f"keys of {key.project}")
    ((number,),) = yield SqlStep(COUNT, (key.project,))
    check_number(number, max_keys, "API keys", setting="max_keys", hint="Revoke some first.")
    yield SqlStep(SAVE, (*key[:4], " ".join(key.scopes), *key[5:]))


def _read_key(row: Sequence[Any]) -> StoredKey:
    key = StoredKey(*row)
    return key._replace(scopes=tuple(row[4].split()))
