"""`antiphon files`: upload, list and delete files on a running server."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from antiphon.cli.download import ProgressBar
from antiphon.cli.server_client import ServerClient, connect
from antiphon.errors import AntiphonError

_PAGE = 100
_BATCH_FILES = 500
_POLL_SECONDS = 0.2


def run(arguments: Namespace) -> int:
    client = connect(arguments)
    if arguments.action == "add":
        added = upload_files(client, arguments.files, purpose=arguments.purpose)
        failed = index_files(client, arguments.to, added) if arguments.to else False
        return 1 if failed else 0
    if arguments.action == "list":
        query = "" if arguments.purpose is None else f"&purpose={quote(arguments.purpose, safe='')}"
        for each in list_pages(client, "/v1/files", query):
            print(f"{each['id']}  {each['bytes']:>12,}  {each['purpose']:<12}  {each['filename']}")
    else:
        for file_id in arguments.ids:
            client.ask("DELETE", f"/v1/files/{quote(file_id, safe='')}")
    return 0


def upload_files(client: ServerClient, paths: Sequence[Path], *, purpose: str, shown: bool = True) -> dict[str, str]:
    """Upload files with a progress bar on a terminal. Print and return their ids and names."""
    added: dict[str, str] = {}
    for path in paths:
        try:
            size = path.stat().st_size
            if sys.stderr.isatty():
                with ProgressBar(path.name, max(size, 1), sys.stderr) as progress:
                    file = client.upload_file(path, purpose=purpose, on_progress=progress.update)
            else:
                file = client.upload_file(path, purpose=purpose, on_progress=lambda _: None)
        except OSError as error:
            raise AntiphonError(f"Cannot read {path}: {error.strerror}.") from None
        added[file["id"]] = path.name
        if shown:
            print(f"{file['id']}  {path.name}")
    return added


def index_files(client: ServerClient, store_id: str, files: dict[str, str]) -> bool:
    """Add files to a vector store and wait until they are indexed. Print the failed ones; return True if any failed."""
    store = f"/v1/vector_stores/{quote(store_id, safe='')}"
    ids = list(files)
    failed = False
    for start in range(0, len(ids), _BATCH_FILES):
        batch = client.ask("POST", f"{store}/file_batches", {"file_ids": ids[start : start + _BATCH_FILES]})
        path = f"{store}/file_batches/{batch['id']}"
        _wait(client, path, batch)
        for each in list_pages(client, f"{path}/files", "&filter=failed"):
            failed = True
            print(f"{files[each['id']]}: {each['last_error']['message']}", file=sys.stderr)
    return failed


def _wait(client: ServerClient, path: str, batch: Any) -> None:
    """Wait until the files of a batch are indexed, and show the progress on a terminal."""
    while True:
        counts = batch["file_counts"]
        if sys.stderr.isatty():
            done = counts["total"] - counts["in_progress"]
            end = "\n" if not counts["in_progress"] else ""
            sys.stderr.write(f"\rindexed {done} of {counts['total']} files{end}")
            sys.stderr.flush()
        if not counts["in_progress"]:
            return
        time.sleep(_POLL_SECONDS)
        batch = client.ask("GET", path)


def list_pages(client: ServerClient, path: str, query: str = "") -> Iterator[Any]:
    """Yield the objects of all pages of a list."""
    after = ""
    while True:
        page = client.ask("GET", f"{path}?limit={_PAGE}{query}{after}")
        yield from page["data"]
        if not page["has_more"]:
            return
        after = f"&after={quote(page['last_id'], safe='')}"
