"""The check that a server without keys is reachable only from its own machine."""

import socket

from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from antiphon.server.host_rules import is_loopback


def check_exposure(settings: Settings, *, has_stored_keys: bool = False) -> str | None:
    """Raise ConfigError if other machines could use the server without a key, unless `insecure` allows it.

    Return the warning to log if `insecure` allows it.
    """
    if settings.api_keys or has_stored_keys or is_local_host(settings.host):
        return None
    if settings.insecure:
        return f"insecure: anyone who can reach {settings.host} can use this server, because it has no API keys"
    raise ConfigError(
        f"host: {settings.host} is reachable from other machines, and the server has no API key. Create one with "
        "'antiphon keys create', set api_keys (ANTIPHON_API_KEYS), or listen on 127.0.0.1. To let anyone who can "
        "reach the server use it, pass --insecure (insecure = true)."
    )


def is_local_host(host: str) -> bool:
    """Return True if the host to listen on is a loopback address, or a name that has only such addresses."""
    if host.lower() == "localhost" or is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_loopback(str(address[0])) for *_, address in found)
