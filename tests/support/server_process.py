"""A server process: `server_process.py PORT GRACE STORE SCRIPT`. It prints its URL when it is ready."""

import json
import sys
from pathlib import Path

from antiphon.config.loading import load
from antiphon.engine.assembly import build_engine
from antiphon.errors import AntiphonError
from antiphon.server.log import configure_logging
from antiphon.server.process import serve


def announce(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


port, grace, store, script = sys.argv[1:]
settings = load(
    None,
    {"HOME": str(Path.cwd())},
    {
        "port": int(port),
        "store": store,
        "shutdown_grace_seconds": float(grace),
        "backends": {"scripted": {"kind": "scripted", "script": json.loads(script)}},
    },
)
configure_logging(settings)
try:
    serve(build_engine(settings), settings, on_ready=announce)
except AntiphonError as error:
    sys.exit(str(error))
