"""The host names that a server without keys accepts in the header `Host`."""

import ipaddress
import socket
from collections.abc import Iterable

from antiphon.errors import HostNotAllowed

_MAX_REMEMBERED_HOSTS = 256
_MAX_SHOWN_HOST = 100


class HostRules:
    """The host names in `Host` that a server without keys accepts.

    A web page can give its own name a new address, such as a loopback address (DNS rebinding). The browser then takes
    this server for the page's own, and only `Host` shows the name. So only names are accepted that no page can have:

    - `localhost` and loopback addresses;
    - the names in `allowed_hosts`, where `*.name` means all subdomains of `name`, and `*` all names;
    - if the server listens on another address than loopback: every IP address, because an address is not resolved and
      cannot be rebound, and the host name of this machine, also with `.local`.
    """

    def __init__(self, *, host: str, allowed_hosts: Iterable[str]) -> None:
        names = {name.strip().lower().rstrip(".").strip("[]") for name in allowed_hosts}
        self._accepts_all = "*" in names
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._names = names | {"localhost"}
        self._accepts_addresses = not (host.lower() == "localhost" or is_loopback(host))
        if self._accepts_addresses:
            machine = socket.gethostname().lower()
            short = machine.partition(".")[0]
            self._names |= {host.lower(), machine, short, f"{short}.local"}
        self._remembered: set[bytes] = set()

    def check(self, header: bytes) -> None:
        """Raise HostNotAllowed unless the `Host` header has a name that is accepted."""
        if header in self._remembered:
            return
        name = _parse_host(header)
        if not self._accepts(name):
            raise HostNotAllowed(
                f"The host name '{name[:_MAX_SHOWN_HOST]}' is not allowed. Without API keys, this server accepts only "
                "names of its own machine, because web pages can forge others. To allow the name, add it to "
                "the setting allowed_hosts, or set api_keys."
            )
        if len(self._remembered) < _MAX_REMEMBERED_HOSTS:
            self._remembered.add(header)

    def _accepts(self, name: str) -> bool:
        if self._accepts_all or name in self._names or (self._suffixes and name.endswith(self._suffixes)):
            return True
        return _is_address(name) if self._accepts_addresses else is_loopback(name)


def _parse_host(header: bytes) -> str:
    """Return the name or address in a `Host` header, in lower case and without the port."""
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return True if a text is a loopback address, which may be IPv4 mapped to IPv6."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
