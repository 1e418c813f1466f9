"""The end of asyncio tasks."""

import asyncio
from typing import Any


async def cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended. Their errors are dropped. A task may be None."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
