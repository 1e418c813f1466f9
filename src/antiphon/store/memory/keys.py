"""API keys in memory, for servers inside another program and for tests."""

from antiphon.store.keys import StoredKey
from antiphon.store.memory.tables import MemoryTables
from antiphon.store.object_limits import check_number


class MemoryKeys(MemoryTables):
    async def save_key(self, key: StoredKey) -> None:
        number = sum(each.project == key.project and each.revoked_at is None for each in self._tables.api_keys.values())
        check_number(number, self._limits.max_keys, "API keys", setting="max_keys", hint="Revoke some first.")
        self._tables.api_keys[key.id] = key

    async def find_key(self, digest: bytes) -> StoredKey | None:
        return next((key for key in self._tables.api_keys.values() if key.digest == digest), None)

    async def list_keys(self) -> list[StoredKey]:
        return sorted(self._tables.api_keys.values(), key=lambda key: (key.created_at, key.id))

    async def has_keys(self) -> bool:
        return bool(self._tables.api_keys)

    async def revoke_key(self, key_id: str, revoked_at: int) -> bool:
        key = self._find_valid(key_id)
        if key is not None:
            self._tables.api_keys[key_id] = key._replace(revoked_at=revoked_at)
        return key is not None

    async def rotate_key(self, key_id: str, digest: bytes, expires_at: int | None) -> bool:
        key = self._find_valid(key_id)
        if key is not None:
            self._tables.api_keys[key_id] = key._replace(digest=digest, expires_at=expires_at)
        return key is not None

    async def record_key_use(self, key_id: str, used_at: int, *, interval: int) -> None:
        key = self._tables.api_keys.get(key_id)
        if key is not None and (key.last_used_at is None or key.last_used_at <= used_at - interval):
            self._tables.api_keys[key_id] = key._replace(last_used_at=used_at)

    def _find_valid(self, key_id: str) -> StoredKey | None:
        key = self._tables.api_keys.get(key_id)
        return key if key is not None and key.revoked_at is None else None
