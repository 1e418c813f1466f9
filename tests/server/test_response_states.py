"""A model of stored responses, compared with all endpoints after each step."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.crashing_server import wait_until
from support.live_server import LiveServer, make_settings

SCRIPT = {
    "rules": [
        {"user": "hi", "answers": ["Hello."]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "overloaded"}}]]},
        {"user": "long", "answers": [[{"text": "So much "}, {"finish": "length"}]]},
        {"user": "wait", "answers": [[{"text": "first "}, {"wait": "gate"}, {"text": "last"}]]},
        {"user": "count", "answers": ["{history}"]},
    ]
}
# The status and the output of a response, by its input.
ENDS = {
    "hi": ("completed", "Hello."),
    "fail": ("failed", "So "),
    "long": ("incomplete", "So much "),
    "wait": ("completed", "first last"),
}
RUNNING = ("queued", "in_progress")
NOT_FOUND = (404, "not_found")
ENDED = (200, None)


class Expected:
    """A response as it should be. An empty text means no output."""

    def __init__(self, text: str, previous: "Expected | None", *, background: bool) -> None:
        self.id = ""
        self.text = text
        self.previous = previous
        self.background = background
        self.status = "queued"
        self.output = ""

    @property
    def chain(self) -> list["Expected"]:
        return [self, *(self.previous.chain if self.previous is not None else ())]

    @property
    def continuation(self) -> tuple[int, str | None]:
        """The status and the code of a request that continues this response."""
        if any(each.status == "deleted" for each in self.chain):
            return 400, "previous_response_not_found"
        return (400, "previous_response_not_ended") if self.status in RUNNING else ENDED

    def end(self, status: str, output: str) -> None:
        self.status, self.output = status, output


class ResponseStates(RuleBasedStateMachine):
    """One background response runs at a time, and the others wait in the order of their creation."""

    def __init__(self) -> None:
        super().__init__()
        self.server = LiveServer(SCRIPT, make_settings(background_slots=1))
        self.known: list[Expected] = []
        self.waiting: list[Expected] = []

    def teardown(self) -> None:
        self.server.stop()

    # Steps

    @rule(text=st.sampled_from(["hi", "fail", "long"]), data=st.data())
    def create(self, text: str, data: st.DataObject) -> None:
        created = self.post(text, data, background=False)
        if created is not None:
            created.end(*ENDS[text])

    @rule(text=st.sampled_from(sorted(ENDS)), data=st.data())
    def create_in_background(self, text: str, data: st.DataObject) -> None:
        created = self.post(text, data, background=True)
        if created is not None:
            self.waiting.append(created)
            self.start_next()

    def post(self, text: str, data: st.DataObject, *, background: bool) -> Expected | None:
        previous = data.draw(st.sampled_from([None, *self.known]))
        body: dict[str, Any] = {"model": "scripted", "input": text, "background": background}
        if previous is not None:
            body["previous_response_id"] = previous.id
        found = self.ask("POST", "", body)
        assert get_result(found) == (ENDED if previous is None else previous.continuation)
        if found.status != 200:
            return None
        created = Expected(text, previous, background=background)
        created.id = found.json["id"]
        self.known.append(created)
        return created

    def start_next(self) -> None:
        """Let the server run the waiting responses up to the next one that waits at the gate."""
        while self.waiting and self.waiting[0].status == "queued":
            first = self.waiting[0]
            if first.text == "wait":
                first.status = "in_progress"
                self.server.wait_for(lambda: self.server.backend.reached("gate"))
            else:
                first.end(*ENDS[first.text])
                self.waiting.remove(first)

    @precondition(lambda self: self.waiting)
    @rule()
    def let_pass(self) -> None:
        self.server.do(lambda: self.server.backend.release("gate"))
        first = self.waiting.pop(0)
        first.end(*ENDS["wait"])
        self.start_next()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.known))
        found = self.ask("POST", f"/{chosen.id}/cancel")
        if chosen.status == "deleted":
            assert get_result(found) == NOT_FOUND
        elif not chosen.background:
            assert get_result(found) == (400, "invalid_value")
        else:
            if chosen.status in RUNNING:
                chosen.end("cancelled", "first " if chosen.status == "in_progress" else "")
                self.waiting.remove(chosen)
            assert (found.status, found.json) == (200, self.ask("GET", f"/{chosen.id}").json)
            self.start_next()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.known))
        found = self.ask("DELETE", f"/{chosen.id}")
        assert get_result(found) == (NOT_FOUND if chosen.status == "deleted" else (200, None))
        if chosen in self.waiting:
            self.waiting.remove(chosen)
        chosen.end("deleted", "")
        self.start_next()

    # Checks

    @invariant()
    def endpoints_show_the_expected_states(self) -> None:
        for each in self.known:
            if each.status == "deleted":
                self.check_deleted(each)
            else:
                self.check_stored(each)
            self.check_continuation(each)

    def check_deleted(self, expected: Expected) -> None:
        for path in ("", "?stream=true", "/input_items"):
            assert get_result(self.ask("GET", f"/{expected.id}{path}")) == NOT_FOUND

    def check_stored(self, expected: Expected) -> None:
        wait_until(lambda: self.ask("GET", f"/{expected.id}").json["status"] == expected.status)
        response = self.ask("GET", f"/{expected.id}").json
        output = "".join(part["text"] for item in response["output"] for part in item["content"])
        assert (output, response["background"]) == (expected.output, expected.background)
        items = self.ask("GET", f"/{expected.id}/input_items").json["data"]
        assert [part["text"] for item in items for part in item["content"]] == [expected.text]
        if not expected.background:
            assert get_result(self.ask("GET", f"/{expected.id}?stream=true")) == (400, "invalid_value")
        elif expected.status not in RUNNING:
            *_, last, done = self.ask("GET", f"/{expected.id}?stream=true").body.decode().strip().split("\n\n")
            assert done == "data: [DONE]"
            assert last.endswith(f"{self.ask('GET', f'/{expected.id}').body.decode()}}}")

    def check_continuation(self, expected: Expected) -> None:
        body = {"model": "scripted", "input": "count", "previous_response_id": expected.id}
        assert get_result(self.ask("POST", "/input_tokens", body)) == expected.continuation
        found = self.ask("POST", "", body | {"store": False})
        assert get_result(found) == expected.continuation
        if found.status == 200:
            history = sum(1 + bool(each.output) for each in expected.chain)
            assert found.json["output"][0]["content"][0]["text"] == str(history + 1)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        return self.server.ask(method, f"/v1/responses{path}", body)


def get_result(found: Any) -> tuple[int, str | None]:
    """Return the status, and the code of an error."""
    return found.status, found.json["error"]["code"] if found.status >= 400 else None


TestResponseStates = ResponseStates.TestCase
TestResponseStates.settings = settings(stateful_step_count=12)
