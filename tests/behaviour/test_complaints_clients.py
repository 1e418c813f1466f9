"""Complaints of clients that speak the Responses API to every server (L): each is a test."""

from collections.abc import Callable

from live_server import Running


def test_pain_l_83_the_path_that_clients_call_by_default_is_there(server: Running) -> None:
    response = server.client().responses.create(model="scripted", input="hi")
    assert response.status == "completed"
    assert "scripted" in [model.id for model in server.client().models.list()]


def test_pain_l_85_a_client_that_continues_and_sends_the_whole_history_too_does_not_tell_it_twice(
    serve: Callable[..., Running],
) -> None:
    client = serve({"default": "I have read {history} items."}).client()
    first = client.responses.create(model="scripted", input="one")
    asked = client.responses.input_items.list(first.id).data
    resent = [item.model_dump(exclude_none=True) for item in (*asked, *first.output)]
    again = client.responses.create(
        model="scripted",
        previous_response_id=first.id,
        input=[*resent, {"role": "user", "content": "two"}],  # type: ignore[list-item]
    )
    assert again.output_text == "I have read 3 items."
