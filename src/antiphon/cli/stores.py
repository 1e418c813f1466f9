"""`antiphon stores`: create, list and search vector stores on a running server."""

from argparse import Namespace
from urllib.parse import quote

from antiphon.cli.files import index_files, list_pages, upload_files
from antiphon.cli.server_client import connect


def run(arguments: Namespace) -> int:
    client = connect(arguments)
    if arguments.action == "create":
        store = client.ask("POST", "/v1/vector_stores", {"name": arguments.name})
        added = upload_files(client, arguments.files, purpose="assistants", shown=False)
        failed = index_files(client, store["id"], added) if added else False
        print(f"{store['id']}  {arguments.name}")
        return 1 if failed else 0
    if arguments.action == "list":
        for each in list_pages(client, "/v1/vector_stores"):
            counts = each["file_counts"]
            print(
                f"{each['id']}  {each['status']:<11}  {counts['completed']:>5}/{counts['total']} files  {each['name']}"
            )
        return 0
    body = {"query": arguments.query, "max_num_results": arguments.limit}
    for found in client.ask("POST", f"/v1/vector_stores/{quote(arguments.id, safe='')}/search", body)["data"]:
        text = " ".join(part["text"] for part in found["content"])
        print(f"{found['score']:.3f}  {found['filename']}")
        print(f"       {' '.join(text.split())[:300]}")
    return 0
