"""The model of a turn that a client asks for: the first request is the client's, the others follow from the calls."""

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from antiphon.agent.history import as_call, list_calls, make_output
from antiphon.agent.journal import State
from antiphon.agent.model import Spoken, Turn, as_failure, hear, make_answer
from antiphon.agent.transports.base import Gathering, Transport
from antiphon.errors import AntiphonError
from antiphon.protocol.json_text import JsonObject

FINALIZE = "FINALIZE NOW: no more tools can be called. Give your final answer with what you have."
# What holds for one request only: the rest is the same throughout the turn.
_ONCE = ("input", "previous_response_id", "tool_choice")


class ExecutionModel:
    """Continues each response by its id. `responses` are those that came to their end, `failed` is one that did not,
    and `error` says why.
    """

    def __init__(self, transport: Transport, first: JsonObject) -> None:
        self._transport = transport
        self._first = first
        self.responses: list[JsonObject] = []
        self.failed: JsonObject | None = None
        self.error: AntiphonError | None = None

    async def take_turn(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Turn:
        gathering = Gathering()
        try:
            request = self._continue(state, use_tools=use_tools) if self.responses else self._first
            async with aclosing(await self._transport.stream(request)) as events:
                # Nothing is said yet, but whoever waits may know that the request was taken.
                yield Spoken("text", "")
                async for batch in events:
                    gathering.feed(batch)
                    for event in batch:
                        spoken = hear(event)
                        if spoken is not None:
                            yield spoken
            response = gathering.finish()
            answer = make_answer(response | {"output": [_as_function(item) for item in response["output"]]})
        except AntiphonError as error:
            self.failed, self.error = gathering.response, error
            raise
        except Exception as error:
            self.error = as_failure(error)
            raise self.error from error
        self.responses.append(response)
        yield answer

    def _continue(self, state: State, *, use_tools: bool) -> JsonObject:
        last = self.responses[-1]
        outputs = [item["output"] for item in state.history[state.sent :]]
        answers = [make_output(*each) for each in zip(list_calls(last["output"]), outputs, strict=True)]
        request = {name: value for name, value in self._first.items() if name not in _ONCE}
        request |= {"previous_response_id": last["id"], "input": answers}
        if not use_tools:
            request |= {"input": [*answers, {"role": "user", "content": FINALIZE}], "tool_choice": "none"}
        return request


def _as_function(item: JsonObject) -> JsonObject:
    """A call as the loop knows it: there are no other kinds than functions."""
    if item.get("type") != "custom_tool_call":
        return item
    call = as_call(item)
    # Its input is any text, and arguments are JSON: what was cut off must not be taken for whole, nor the reverse.
    arguments = msgspec.json.encode({"input": call.arguments}).decode()
    function = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": arguments}
    return function | ({"status": item["status"]} if "status" in item else {})
