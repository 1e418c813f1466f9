"""The engine with DBOS, in a file beside the store. See desk.py for the command."""

from antiphon.config import DbosSettings
from benchmarks.drivers import lease_queue
from benchmarks.drivers.desk import Place, serve


async def open_queue(place: Place) -> lease_queue.LeaseQueue:
    return await lease_queue.open_queue(place, DbosSettings(database=f"sqlite:///{place.folder}/dbos.db"))


if __name__ == "__main__":
    serve(open_queue)
