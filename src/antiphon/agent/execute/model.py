"""The model client of the execute endpoint: the first request is the client's, later ones send the tool outputs."""

from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec

from antiphon.agent.history import find_complete_calls, make_output_item, to_invocation
from antiphon.agent.model import make_turn_error
from antiphon.agent.model_answer import ModelDelta, TurnStream, make_answer, read_delta
from antiphon.agent.run_state import RunState
from antiphon.agent.transports.base import ResponseCollector, Transport
from antiphon.errors import AntiphonError
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage

FINALIZE = "FINALIZE NOW: no more tools can be called. Give your final answer with what you have."
# Parameters of the first request only. The others are repeated in every request of the turn.
_FIRST_ONLY = ("input", "previous_response_id", "tool_choice")


class ExecutionModel:
    """Continues each response by its id.

    `responses` are the finished ones. If one failed, `failed` is that response and `error` the reason.
    """

    interrupted_usage = Usage(0, 0, 0)

    def __init__(self, transport: Transport, first: JsonObject) -> None:
        self._transport = transport
        self._first = first
        self.responses: list[JsonObject] = []
        self.failed: JsonObject | None = None
        self.error: AntiphonError | None = None

    @property
    def first_items(self) -> list[JsonObject]:
        """The items of the first request."""
        items = self._first["input"]
        return [{"role": "user", "content": items}] if isinstance(items, str) else items

    def wrap_transport(self, wrap: Callable[[Transport], Transport]) -> None:
        """Replace the transport by one around it."""
        self._transport = wrap(self._transport)

    async def take_turn(self, state: RunState, extra_input: Sequence[JsonObject], *, use_tools: bool) -> TurnStream:
        collector = ResponseCollector()
        try:
            request = self._make_continuation(state, use_tools=use_tools) if self.responses else self._first
            async with aclosing(await self._transport.stream(request)) as events:
                # An empty delta reports that the server has accepted the request.
                yield [ModelDelta("text", "")]
                async for batch in events:
                    collector.feed(batch)
                    deltas = [delta for delta in map(read_delta, batch) if delta is not None]
                    if deltas:
                        yield deltas
            response = collector.finish()
            answer = make_answer(response | {"output": [_to_function_call(item) for item in response["output"]]})
        except AntiphonError as error:
            self.failed, self.error = collector.response, error
            raise
        except Exception as error:
            self.error = make_turn_error(error)
            raise self.error from error
        self.responses.append(response)
        yield answer

    def _make_continuation(self, state: RunState, *, use_tools: bool) -> JsonObject:
        last = self.responses[-1]
        outputs = [item["output"] for item in state.history[state.sent_count :]]
        items = [make_output_item(*each) for each in zip(find_complete_calls(last["output"]), outputs, strict=True)]
        request = {name: value for name, value in self._first.items() if name not in _FIRST_ONLY}
        request |= {"previous_response_id": last["id"], "input": items}
        if not use_tools:
            request |= {"input": [*items, {"role": "user", "content": FINALIZE}], "tool_choice": "none"}
        return request


def _to_function_call(item: JsonObject) -> JsonObject:
    """Return a call as a function call, the only kind that the loop knows."""
    if item.get("type") != "custom_tool_call":
        return item
    call = to_invocation(item)
    # The input is any text. As JSON arguments it cannot be mistaken for arguments that were cut off.
    arguments = msgspec.json.encode({"input": call.arguments}).decode()
    function = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": arguments}
    return function | ({"status": item["status"]} if "status" in item else {})
