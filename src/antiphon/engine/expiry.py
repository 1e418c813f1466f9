"""Expiry: the time for which responses and conversations are stored, and their deletion."""

import asyncio
import logging
import time

from antiphon.engine.policy import Policy
from antiphon.errors import StoreUnavailable
from antiphon.store.base import ResponseStore, Store
from antiphon.tasks import cancel_tasks

logger = logging.getLogger(__name__)

# Interval of the deletion, and the time for which expired rows are only hidden.
EXPIRY_INTERVAL_SECONDS = 3600.0
# The time for which an effect stays claimed if responses do not expire.
_CLAIM_SECONDS = 365 * 24 * 60 * 60


def compute_expiry(policy: Policy) -> int | None:
    """Return the time at which data stored now expires, or None."""
    return None if policy.retention_seconds is None else int(time.time()) + policy.retention_seconds


async def claim_effect(store: Store, policy: Policy, project: str, key: str) -> bool:
    """Claim an effect for as long as responses are stored, so that the claims do not fill the database."""
    expires_at = compute_expiry(policy) or int(time.time()) + _CLAIM_SECONDS
    return await store.claim_effect(project, key, expires_at=expires_at)


class ExpirySweeper:
    """Deletes responses and conversations that expired an hour ago, and shrinks the store: at the start and every hour.

    Until then they are only hidden, because a response in progress may still continue one of them.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_regularly())

    async def close(self) -> None:
        await cancel_tasks(self._task)

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                deleted = await self._store.expire(int(time.time() - EXPIRY_INTERVAL_SECONDS))
                freed = await self._store.shrink()
            except StoreUnavailable as error:
                logger.error("expired responses and conversations could not be deleted: %s", error.message)
            except Exception:
                logger.exception("expired responses and conversations could not be deleted")
            else:
                if deleted:
                    logger.info("deleted %d expired responses and conversations", deleted)
                if freed:
                    logger.info("the store is %d KB smaller", freed >> 10)
            await asyncio.sleep(EXPIRY_INTERVAL_SECONDS)
