"""A worker: a server process on the socket of its supervisor. The supervisor starts it with two file descriptors."""

import asyncio
import contextlib
import signal
import socket
import sys
from types import FrameType

from antiphon.engine.assembly import build_engine
from antiphon.errors import AntiphonError
from antiphon.server.log import configure_logging
from antiphon.server.process import Server, prepare_process
from antiphon.server.workers.link import SupervisorLink
from antiphon.server.workers.messages import Start, WorkerFailed, WorkerReady, encode_frame, receive_start
from antiphon.server.workers.peers import WorkerPeers


class WorkerServer(Server):
    """The server of a worker. Ctrl-C reaches all processes of a terminal: the supervisor handles it."""

    stop_signals = (signal.SIGTERM,)
    shares_listeners = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start a graceful shutdown. A signal to the whole group of processes arrives twice: directly and forwarded.

        The supervisor kills a worker that does not end.
        """
        if not self.should_exit:
            super().handle_exit(sig, frame)


def run_worker(connection: socket.socket, listener: socket.socket) -> int:
    """Serve until the supervisor ends this process. Return the exit status."""
    start = receive_start(connection)
    if start is None:
        return 1
    sys.path[:] = start.module_path
    try:
        _serve(start, connection, listener)
    except (AntiphonError, OSError) as error:
        with contextlib.suppress(OSError):  # the supervisor has ended, or the event loop has closed the connection
            connection.setblocking(True)
            connection.sendall(encode_frame(WorkerFailed(" ".join(str(error).split()))))
        return 1
    return 0


def _serve(start: Start, connection: socket.socket, listener: socket.socket) -> None:
    configure_logging(start.settings)
    engine = build_engine(start.settings)
    settings = prepare_process(engine, start.settings)
    link = SupervisorLink(connection)
    opening: list[asyncio.Task[None]] = []

    def connect(_: str) -> None:
        needs_key = bool(settings.api_keys) or engine.has_stored_keys
        ready = WorkerReady([model.id for model in engine.models()], needs_key, engine.owner)
        opening.append(asyncio.get_running_loop().create_task(link.open(ready)))

    server = WorkerServer(engine, settings, on_ready=connect)
    link.on_end = server.request_stop
    link.apply_settings = server.apply_settings
    peers = WorkerPeers(link, engine, server.metrics)
    if server.metrics is not None:
        server.metrics.join(start.number, peers.collect_metrics)
    server.run(sockets=[listener])


def main() -> int:
    # The supervisor handles the signals of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    return run_worker(connection, listener)


if __name__ == "__main__":
    sys.exit(main())
