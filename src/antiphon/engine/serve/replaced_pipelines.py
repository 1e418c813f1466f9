"""Pipelines that new settings have replaced. Each is closed when its last request has ended."""

import asyncio
import logging

from antiphon.engine.serve.pipeline import Pipeline
from antiphon.tasks import cancel_tasks

logger = logging.getLogger(__name__)


class ReplacedPipelines:
    """The replaced pipelines that are still open. They can share backends with each other and with the current one."""

    def __init__(self) -> None:
        self._closing: dict[Pipeline, asyncio.Task[None]] = {}
        self._current: Pipeline | None = None

    def add(self, replaced: Pipeline, current: Pipeline) -> None:
        """Close a pipeline when it is not used any more, without the parts that others use."""
        self._current = current
        self._closing[replaced] = asyncio.get_running_loop().create_task(self._close_unused(replaced))

    async def close(self, current: Pipeline) -> None:
        """Close all replaced pipelines now."""
        await cancel_tasks(*self._closing.values())
        while self._closing:
            replaced, _ = self._closing.popitem()
            await replaced.close(others=(*self._closing, current))

    async def _close_unused(self, replaced: Pipeline) -> None:
        await replaced.wait_until_unused()
        del self._closing[replaced]
        assert self._current is not None
        try:
            await replaced.close(others=(*self._closing, self._current))
        except Exception:
            logger.exception("closing a replaced backend failed")
