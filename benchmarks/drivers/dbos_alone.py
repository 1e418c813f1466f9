"""DBOS and nothing else: a workflow of one step, started directly, with the text as its outcome. See desk.py.

Nobody could ask for the response later, so this is less than is needed: it shows the part that is DBOS's own. It can do
nothing but `answer`.
"""

from dbos import DBOS, SetWorkflowID

from benchmarks.drivers.desk import Place, serve
from benchmarks.drivers.workflows import WorkflowQueue, configure


class DbosAlone(WorkflowQueue):
    async def start(self, response_id: str) -> None:
        with SetWorkflowID(response_id):
            await DBOS.start_workflow_async(respond, response_id)


queue: DbosAlone


@DBOS.step()
async def ask(response_id: str) -> str:
    return await queue.hear(response_id)


@DBOS.workflow()
async def respond(response_id: str) -> str:
    text = await ask(response_id)
    queue.tell(response_id, text)
    return text


async def open_queue(place: Place) -> DbosAlone:
    global queue  # noqa: PLW0603, workflows are functions of a module
    queue = DbosAlone(place)
    DBOS(config=configure(place, place.folder / "dbos.db"))
    DBOS.launch()
    return queue


if __name__ == "__main__":
    serve(open_queue)
