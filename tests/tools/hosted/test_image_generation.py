"""The hosted tool `image_generation`: generations, edits, partial images and failures of an images endpoint."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from antiphon.config.tools import ImageGenerationSettings
from antiphon.engine.files.loader import FileServiceLoader, StoredImages
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.files import FileForm
from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.tools.hosted.base import HostedServices, HostedSession
from antiphon.tools.hosted.image_generation import inputs
from antiphon.tools.hosted.image_generation.tool import ImageGenerationHostedTool
from support.hosted_sessions import compose, list_types, make_context, run_call
from support.upstream_server import STALL, Reply, UpstreamServer, json_of, serve, stream_of

KEY = "images-key-1234"
PNG = b64encode(b"png bytes").decode()
CAT, MASK = b"\x89PNG\r\n\x1a\ncat", b"\x89PNG\r\n\x1a\nmask"
CALL = '{"prompt": "a cat"}'
MADE = json_of(
    {
        "created": 1,
        "size": "1024x1024",
        "quality": "low",
        "output_format": "png",
        "background": "opaque",
        "data": [{"b64_json": PNG}],
    }
)


@asynccontextmanager
async def hosting(server: UpstreamServer, **options: Any) -> AsyncIterator[ImageGenerationHostedTool]:
    settings = ImageGenerationSettings(base_url=server.url, model="m-image", api_key=KEY, **options)
    tool = ImageGenerationHostedTool(settings)
    await tool.start()
    try:
        yield tool
    finally:
        await tool.close()


async def open_session(
    tool: ImageGenerationHostedTool,
    items: Any = (),
    *,
    files: FileServiceLoader | None = None,
    project: str = "p",
    **fields: Any,
) -> HostedSession:
    context = make_context([{"type": "image_generation"} | fields], input=list(items))
    if files is not None:
        services = HostedServices(images=StoredImages(files))
        context = msgspec.structs.replace(context, services=services, project=project)
    assert context.request.tools is not None
    return await tool.open(context.request.tools[0], context)


def show(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}


def event_of(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


async def test_image_has_the_documented_events_and_fields() -> None:
    async with serve([MADE]) as server, hosting(server) as tool:
        session = await open_session(tool, size="1024x1024", quality="low", output_format="png", background="auto")
        events, output = compose(await run_call(session, "image_generation", CALL))
    assert list_types(events) == [
        "output_item.added",
        "image_generation_call.in_progress",
        "image_generation_call.generating",
        "image_generation_call.completed",
        "output_item.done",
    ]
    assert events[0]["item"] == {"type": "image_generation_call", "id": "ig_1", "status": "in_progress", "result": None}
    assert output == [
        {
            "type": "image_generation_call",
            "id": "ig_1",
            "status": "completed",
            "result": PNG,
            "action": "generate",
            "background": "opaque",
            "output_format": "png",
            "quality": "low",
            "size": "1024x1024",
        }
    ]
    (request,) = server.requests
    assert (request.path, request.headers["authorization"]) == ("/v1/images/generations", f"Bearer {KEY}")
    assert request.json == {
        "model": "m-image",
        "prompt": "a cat",
        "n": 1,
        "output_format": "png",
        "quality": "low",
        "size": "1024x1024",
    }


async def test_partial_images_are_events() -> None:
    reply = stream_of(
        event_of("image_generation.partial_image", b64_json="cDE=", partial_image_index=0, size="1024x1024"),
        event_of("image_generation.partial_image", b64_json="cDI=", partial_image_index=1),
        event_of("image_generation.completed", b64_json=PNG, size="1024x1024", usage={"total_tokens": 5}),
    )
    async with serve([reply]) as server, hosting(server) as tool:
        session = await open_session(tool, partial_images=2, model="other")
        events, output = compose(await run_call(session, "image_generation", CALL))
    partial = [event for event in events if event["type"].endswith("partial_image")]
    assert [(event["partial_image_index"], event["partial_image_b64"]) for event in partial] == [
        (0, "cDE="),
        (1, "cDI="),
    ]
    assert (partial[0]["size"], partial[0]["item_id"], output[0]["result"]) == ("1024x1024", "ig_1", PNG)
    assert server.requests[0].json == {
        "model": "other", "prompt": "a cat", "n": 1, "stream": True, "partial_images": 2
    }  # fmt: skip


async def test_edit_sends_the_latest_images() -> None:
    data = f"data:image/png;base64,{PNG}"
    photo = Reply(headers={"Content-Type": "image/jpeg"}, body=b"jpeg bytes")
    async with serve([photo, MADE, MADE]) as server, hosting(server) as tool:
        items = [show(data), show(f"{server.url}/cat.jpg")]
        session = await open_session(tool, items, input_image_mask={"image_url": data})
        (function,) = session.functions
        edited = '{"prompt": "with a hat", "action": "edit"}'
        _, output = compose(await run_call(session, "image_generation", edited))
        await run_call(session, "image_generation", edited, "c2")
    assert function.parameters["properties"]["action"]["enum"] == ["generate", "edit"]
    assert (output[0]["action"], output[0]["status"]) == ("edit", "completed")
    fetched, first, second = server.requests
    assert (fetched.path, first.path) == ("/v1/cat.jpg", "/v1/images/edits")
    assert first.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert b'name="image[]"; filename="0.jpeg"\r\nContent-Type: image/jpeg\r\n\r\njpeg bytes\r\n' in first.body
    assert b'name="mask"; filename="1.png"\r\nContent-Type: image/png\r\n\r\npng bytes\r\n' in first.body
    assert b'name="prompt"\r\n\r\nwith a hat\r\n' in first.body
    assert b"png bytes" in second.body  # the image that was made is edited next


async def test_edit_uses_images_and_a_mask_by_file_id() -> None:
    files = FileServiceLoader()
    photo, mask = [await store_file(files, name, data) for name, data in (("a.png", CAT), ("mask.png", MASK))]
    text = await store_file(files, "a.txt", b"text")
    by_id = {"role": "user", "content": [{"type": "input_image", "file_id": photo}]}
    edit = '{"prompt": "with a hat", "action": "edit"}'
    async with serve([MADE]) as server, hosting(server) as tool:
        session = await open_session(tool, [by_id], files=files, input_image_mask={"file_id": mask})
        _, output = compose(await run_call(session, "image_generation", edit))
        assert (output[0]["action"], output[0]["status"]) == ("edit", "completed")
        session = await open_session(tool, [by_id], files=files, input_image_mask={"file_id": text})
        _, failed = compose(await run_call(session, "image_generation", edit))
        assert failed[0]["status"] == "failed"
        for wrong, param, code in (
            ({"file_id": "file-unknown"}, "tools[0].input_image_mask.file_id", None),
            ({}, "tools[0].input_image_mask", "missing_required_parameter"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await open_session(tool, [by_id], files=files, input_image_mask=wrong)
            assert (refused.value.param, refused.value.code) == (param, code)
        with pytest.raises(NotFound):
            await open_session(tool, [by_id], files=files, project="other", input_image_mask={"file_id": mask})
    (request,) = server.requests
    assert b'name="image[]"; filename="0.png"\r\nContent-Type: image/png\r\n\r\n' + CAT in request.body
    assert b'name="mask"; filename="1.png"\r\nContent-Type: image/png\r\n\r\n' + MASK in request.body
    await files.close()


async def store_file(files: FileServiceLoader, name: str, data: bytes) -> str:
    service = files.load().files
    writer = await service.start_upload()
    await writer.write(data)
    return (await service.create("p", writer, name, FileForm("vision"))).id


async def test_images_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_TOTAL_BYTES", 15)
    photo = Reply(headers={"Content-Type": "image/jpeg"}, body=b"jpeg bytes")
    async with serve([photo, photo, MADE]) as server, hosting(server) as tool:
        parts = [{"type": "input_image", "detail": "auto", "image_url": f"{server.url}/{name}"} for name in "ab"]
        session = await open_session(tool, [{"type": "message", "role": "user", "content": parts}], action="edit")
        _, output = compose(await run_call(session, "image_generation", CALL))
    assert [request.path for request in server.requests] == ["/v1/a", "/v1/b"]
    assert output[0]["status"] == "failed"


async def test_earlier_image_of_the_conversation_can_be_edited() -> None:
    made = {
        "type": "image_generation_call",
        "id": "ig_0",
        "status": "completed",
        "result": PNG,
        "output_format": "webp",
    }
    async with serve([MADE]) as server, hosting(server) as tool:
        session = await open_session(tool, [made], action="edit")
        await run_call(session, "image_generation", CALL)
    assert b"Content-Type: image/webp\r\n\r\npng bytes" in server.requests[0].body


async def test_image_at_a_url_is_fetched() -> None:
    async with serve([]) as server, hosting(server) as tool:
        server.add(json_of({"data": [{"url": f"{server.url}/made.png", "revised_prompt": "a nice cat"}]}))
        server.add(Reply(headers={"Content-Type": "image/png"}, body=b"png bytes"))
        _, output = compose(await run_call(await open_session(tool), "image_generation", CALL))
    assert (output[0]["result"], output[0]["revised_prompt"]) == (PNG, "a nice cat")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (json_of({"error": {"message": f"bad {KEY}", "code": "x"}}, 401), "status 401"),
        (json_of({"data": []}), "has no image"),
        (Reply(body=b"<html>"), "not in the expected format"),
        (json_of({"data": [{"b64_json": "%%%"}]}), "not valid base64"),
        (stream_of(event_of("image_generation.partial_image", b64_json="", partial_image_index=0)), "without an image"),
        (stream_of(event_of("error", error={"message": "overloaded"})), "overloaded"),
        (Reply(pieces=[b"{", STALL]), "did not answer in time"),
    ],
)
async def test_failure_of_the_endpoint_is_a_failed_item(reply: Reply, message: str) -> None:
    seconds = 0.3 if STALL in (reply.pieces or ()) else 60.0
    async with serve([reply]) as server, hosting(server, timeout=seconds) as tool:
        events, (item,) = compose(await run_call(await open_session(tool), "image_generation", CALL))
    assert (list_types(events)[-1], item["status"], item["result"]) == ("output_item.done", "failed", None)
    assert message in item["error"]["message"]
    assert KEY not in str(item)


async def test_refused_image_has_the_error_of_the_endpoint() -> None:
    error = {"type": "image_generation_user_error", "code": "moderation_blocked", "message": "no", "param": None}
    async with serve([json_of({"error": error}, 400)]) as server, hosting(server) as tool:
        _, (item,) = compose(await run_call(await open_session(tool), "image_generation", CALL))
    assert (item["error"]["type"], item["error"]["code"]) == ("image_generation_user_error", "moderation_blocked")


async def test_edit_of_a_private_image_fails() -> None:
    async with serve([]) as server, hosting(server) as tool:
        session = await open_session(tool, [show("http://10.0.0.1/x.png")], action="edit")
        _, (item,) = compose(await run_call(session, "image_generation", CALL))
    assert "private network" in item["error"]["message"]
    assert server.requests == []


@pytest.mark.parametrize("arguments", ["", "{}", '{"prompt": 1}'])
async def test_invalid_arguments_are_a_failed_item(arguments: str) -> None:
    async with serve([]) as server, hosting(server) as tool:
        _, (item,) = compose(await run_call(await open_session(tool), "image_generation", arguments))
    assert (item["status"], server.requests) == ("failed", [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"partial_images": 4}, "tools[0].partial_images"),
        ({"output_compression": 101}, "tools[0].output_compression"),
        ({"output_format": "gif"}, "tools[0].output_format"),
        ({"frame_count": 3}, "tools[0].frame_count"),
        ({"size": "big"}, "tools[0].size"),
        ({"background": "transparent", "output_format": "jpeg"}, "tools[0].background"),
        ({"input_image_mask": {"image_url": "data:image/png;base64,%%"}}, "tools[0].input_image_mask.image_url"),
        ({"action": "edit"}, "tools[0].action"),
    ],
)
async def test_invalid_tool_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    async with serve([]) as server, hosting(server) as tool:
        with pytest.raises(InvalidRequest) as raised:
            await open_session(tool, **fields)
    assert raised.value.param == param


@pytest.mark.parametrize("size", ["auto", "1536x1024", "2K", "1024*1024", "16:9"])
async def test_sizes_of_other_endpoints_are_sent(size: str) -> None:
    async with serve([MADE]) as server, hosting(server) as tool:
        await run_call(await open_session(tool, size=size), "image_generation", CALL)
    assert server.requests[0].json.get("size") == (None if size == "auto" else size)


@pytest.mark.parametrize("data", [f"{PNG[:4]}\n{PNG[4:]}\n", f"data:image/png;base64,{PNG}"])
async def test_image_is_plain_base64_in_its_item(data: str) -> None:
    async with serve([json_of({"data": [{"b64_json": data}]})]) as server, hosting(server) as tool:
        session = await open_session(tool)
        _, (item,) = compose(await run_call(session, "image_generation", CALL))
    assert (item["status"], item["result"]) == ("completed", PNG)


async def test_image_is_not_made_twice_after_a_crash() -> None:
    async with serve([]) as server, hosting(server) as tool:
        call = (await open_session(tool)).begin("image_generation", "c1")
    assert not call.is_repeatable
    _, (item,) = compose(call.fail("interrupted"))
    assert item["type"] == ImageGenerationCall.__struct_config__.tag
    assert item["status"] == "failed"
