"""DBOS as it runs in this process. To import this takes longer than to start a server, so it is done when needed."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

from dbos import DBOS, DBOSConfig

from antiphon.config import DbosSettings
from antiphon.engine.workflows.client import NAME, WORKFLOW, Client
from antiphon.engine.workflows.database import complete, connect, identify
from antiphon.engine.workflows.quiet import quieten
from antiphon.errors import ConfigError
from antiphon.store.base import RunKey

Perform = Callable[[RunKey], Future[None]]

_perform: Perform | None = None


@DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)  # an attempt counts interruptions itself
async def respond(project: str, response_id: str) -> None:
    assert _perform is not None
    # DBOS has a loop of its own: what it does there keeps nobody waiting elsewhere.
    await asyncio.wrap_future(_perform(RunKey(project, response_id)))


class Instance:
    """DBOS, at work from when this is made until `end`. There is one at a time.

    `executor` names this process, `version` all that take the same runs. To make it and to end it waits for a database,
    which is for threads; and for threads without a loop, which DBOS would take for its workflows.
    """

    def __init__(self, settings: DbosSettings, *, executor: str, version: str, slots: int, perform: Perform) -> None:
        global _perform  # noqa: PLW0603, workflows are functions of a module
        self._settings = settings
        self._url = complete(settings.database)
        self._executor = executor
        self._slots = slots
        self._engine = connect(settings.database)
        self._file = identify(settings.database)
        self.client = Client(self._url, self._engine, version=version)
        try:
            self._make()
            _perform = perform
            self._launch()
        except ConfigError:  # it is another's
            self._close()
            raise
        except BaseException:
            self.end()
            raise

    def is_lost(self) -> bool:
        """Whether its file is gone, or another one has come in its place."""
        return identify(self._settings.database) != self._file

    def end(self) -> None:
        DBOS.destroy()
        self._close()

    def _make(self) -> None:
        quieten()
        DBOS(
            config=DBOSConfig(
                name=NAME,
                system_database_url=self._url,
                system_database_engine=self._engine,
                application_version=self.client.version,
                executor_id=self._executor,
                log_level="CRITICAL",  # until it is there: we tell what keeps it from that
                # We have no use for what it listens to; but its end waits until it looks up.
                notification_listener_polling_interval_sec=self._settings.polling_seconds,
            )
        )
        if DBOS.executor_id != self._executor:
            raise ConfigError("dbos: this process already uses DBOS for something else.")

    def _launch(self) -> None:
        if not self._register_queue():
            # A new database has no tables. DBOS makes them, but then looks for queues only once in a second.
            DBOS.launch()
            self.client.register_queue(self._settings, slots=self._slots)
            DBOS.destroy()
            self._make()
        DBOS.launch()
        logging.getLogger("dbos").setLevel(logging.WARNING)

    def _register_queue(self) -> bool:
        """Before the launch, so that new limits hold from the first response on. False if it cannot be done yet."""
        try:
            self.client.register_queue(self._settings, slots=self._slots)
        except Exception:
            return False
        return True

    def _close(self) -> None:
        self.client.close()
        if self._engine is not None:
            self._engine.dispose()
