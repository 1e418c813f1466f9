"""The socket that a server listens on. Several worker processes can share it."""

import errno
import os
import socket

from antiphon.config.settings import Settings
from antiphon.errors import ConfigError


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


def format_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def explain_bind_error(error: OSError, settings: Settings) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {settings.port} on {settings.host} is in use. Stop the other program, or choose another port."
    return f"Cannot listen on port {settings.port} of {settings.host}: {error.strerror or error}."
