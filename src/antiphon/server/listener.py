"""The socket that a server listens on. Several worker processes can share it."""

import asyncio
import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence

from antiphon.config.settings import Settings
from antiphon.errors import ConfigError

_ACCEPT_SECONDS = 1.0
# Unlike the others, `poll` takes no file descriptor: there may be none left.
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)


def bind_socket(settings: Settings) -> socket.socket:
    """Bind the configured address. Done before the models are loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        if os.name == "posix":  # on Windows two servers could share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(explain_bind_error(error, settings)) from None
    return listener


async def accept_waiting(listeners: Sequence[socket.socket], *, are_shared: bool) -> None:
    """Let the event loop accept the connections that wait in the kernel, before the listeners are closed.

    Closing would reset them. A client cannot safely repeat a request that it has sent on such a connection. Other
    processes may go on to accept connections of shared listeners.
    """
    ends_at = time.monotonic() + _ACCEPT_SECONDS
    with _Selector() as selector:
        for each in listeners:
            if not are_shared:
                each.listen(0)  # the kernel lets further clients wait, until they are refused
            selector.register(each, selectors.EVENT_READ)
        # After an iteration of the loop that accepts a connection, the next one announces it to the server.
        idle_iterations = 0
        while idle_iterations < 2 and time.monotonic() < ends_at:
            await asyncio.sleep(0)
            idle_iterations = 0 if selector.select(0) else idle_iterations + 1


def format_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def explain_bind_error(error: OSError, settings: Settings) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {settings.port} on {settings.host} is in use. Stop the other program, or choose another port."
    return f"Cannot listen on port {settings.port} of {settings.host}: {error.strerror or error}."
