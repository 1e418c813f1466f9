"""Files and uploads with the OpenAI SDK for Python against a real server."""

import hashlib
import io
from typing import Any

import openai
import pytest

CONTENT = b"The Danube flows through Vienna.\n" * 100


@pytest.fixture(scope="module")
def client(serve: Any) -> Any:
    return serve({"models": ["scripted"]}).client()


def test_created_file_has_the_fields_of_the_api(client: Any) -> None:
    expires = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("danube.txt", CONTENT), purpose="user_data", expires_after=expires)
    assert file.id.startswith("file-")
    assert file.to_dict() == {
        "id": file.id,
        "object": "file",
        "bytes": len(CONTENT),
        "created_at": file.created_at,
        "expires_at": file.created_at + 3600,
        "filename": "danube.txt",
        "purpose": "user_data",
        "status": "processed",
        "status_details": None,
    }
    assert client.files.retrieve(file.id) == file
    assert client.files.wait_for_processing(file.id) == file


def test_batch_file_expires_and_its_content_can_be_read(client: Any) -> None:
    file = client.files.create(file=("requests.jsonl", CONTENT), purpose="batch")
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    content = client.files.content(file.id)
    assert content.read() == CONTENT
    assert content.response.headers["content-disposition"] == "attachment; filename*=UTF-8''requests.jsonl"


def test_empty_file_and_unusual_name_are_stored_unchanged(client: Any) -> None:
    name = 'Bericht "Größe"; 1\\2.txt'
    file = client.files.create(file=(name, b""), purpose="batch")
    assert (file.filename, file.bytes) == (name, 0)
    assert client.files.content(file.id).read() == b""


@pytest.mark.parametrize("purpose", ["assistants", "user_data"])
def test_content_of_private_purpose_cannot_be_downloaded(client: Any, purpose: Any) -> None:
    file = client.files.create(file=("a.txt", b"a"), purpose=purpose)
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.content(file.id)
    assert caught.value.body == {
        "message": f"Not allowed to download files of purpose: {purpose}",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_deleted_file_is_unknown(client: Any) -> None:
    file = client.files.create(file=("a.txt", b"a"), purpose="vision")
    deleted = client.files.delete(file.id)
    assert deleted.to_dict() == {"id": file.id, "object": "file", "deleted": True}
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file.id)
        assert caught.value.body == {
            "message": f"No such File object: {file.id}",
            "type": "invalid_request_error",
            "param": "id",
            "code": None,
        }


def test_list_has_pages_an_order_and_a_filter(client: Any) -> None:
    created = [client.files.create(file=(f"{index}.txt", b"a"), purpose="evals").id for index in range(5)]
    assert [file.id for file in client.files.list(purpose="evals", order="asc", limit=2)] == created
    assert [file.id for file in client.files.list(purpose="evals", limit=3)] == created[::-1]
    page = client.files.list(purpose="evals", order="asc", limit=2, after=created[2])
    assert ([file.id for file in page.data], page.has_more) == (created[3:], False)
    with pytest.raises(openai.BadRequestError, match="file-unknown"):
        client.files.list(after="file-unknown")


def test_upload_in_parts_becomes_a_file_in_the_given_order(client: Any) -> None:
    upload = client.uploads.create(bytes=6, filename="abc.jsonl", mime_type="text/plain", purpose="batch")
    assert (upload.status, upload.expires_at - upload.created_at, upload.file) == ("pending", 3600, None)
    second = client.uploads.parts.create(upload.id, data=b"def")
    first = client.uploads.parts.create(upload.id, data=b"abc")
    assert (first.object, first.upload_id) == ("upload.part", upload.id)
    digest = hashlib.md5(b"abcdef").hexdigest()
    done = client.uploads.complete(upload.id, part_ids=[first.id, second.id], md5=digest)
    assert (done.status, done.file.filename, done.file.bytes) == ("completed", "abc.jsonl", 6)
    assert client.files.content(done.file.id).read() == b"abcdef"
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.uploads.parts.create(upload.id, data=b"more")


def test_chunked_upload_of_the_sdk_keeps_the_content(client: Any) -> None:
    done = client.uploads.upload_file_chunked(
        file=io.BytesIO(CONTENT).getvalue(),
        filename="danube.jsonl",
        bytes=len(CONTENT),
        mime_type="text/plain",
        purpose="batch",
        part_size=1000,
    )
    assert client.files.content(done.file.id).read() == CONTENT


def test_upload_with_wrong_parts_stays_pending(client: Any) -> None:
    upload = client.uploads.create(bytes=4, filename="a.jsonl", mime_type="text/plain", purpose="batch")
    part = client.uploads.parts.create(upload.id, data=b"abc")
    for part_ids, md5, param in (
        ([part.id], None, "part_ids"),
        (["part_unknown"], None, "part_ids[0]"),
        ([part.id, part.id], None, "part_ids[1]"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.uploads.complete(upload.id, part_ids=part_ids, md5=md5)
        assert caught.value.param == param
    last = client.uploads.parts.create(upload.id, data=b"d")
    with pytest.raises(openai.BadRequestError, match="MD5"):
        client.uploads.complete(upload.id, part_ids=[part.id, last.id], md5="0" * 32)
    assert client.uploads.complete(upload.id, part_ids=[part.id, last.id]).status == "completed"


def test_cancelled_upload_takes_no_parts(client: Any) -> None:
    upload = client.uploads.create(bytes=4, filename="a.jsonl", mime_type="text/plain", purpose="batch")
    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.uploads.parts.create(upload.id, data=b"abc")
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_unknown")
