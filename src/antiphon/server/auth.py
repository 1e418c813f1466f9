"""Authentication: a bearer key identifies a project. Without keys, host names and origins are checked."""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Mapping

from antiphon.config import DEFAULT_PROJECT, ApiKey
from antiphon.errors import HostNotAllowed, InvalidApiKey, OriginNotAllowed

CHALLENGE = (b"www-authenticate", b'Bearer realm="antiphon"')
_MAX_REMEMBERED_HOSTS = 256
_MAX_SHOWN_HOST = 100


class HostRules:
    """The host names in `Host` that a server without keys accepts.

    A web page can give its own name a new address, such as a loopback address (DNS rebinding). The browser then takes
    this server for the page's own, and only `Host` shows the name. So only names are accepted that no page can have:

    - `localhost` and loopback addresses;
    - the names in `allowed_hosts`, where `*.name` means all names below one, and `*` all names;
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
    """Return True if a text is a loopback address, also as an IPv4 address in IPv6."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class Authenticator:
    """Checks API keys. Without keys every request belongs to the default project.

    Without keys, requests of web pages from other origins are refused: any page open in a browser on this machine could
    otherwise use the models, and read their output over a WebSocket. With keys this check is not needed: such a page
    has no key. For the same reason the host name is checked without keys.
    """

    def __init__(self, keys: Iterable[ApiKey], *, host: str = "127.0.0.1", allowed_hosts: Iterable[str] = ()) -> None:
        self._projects = [(_digest(key.key.encode()), key.project) for key in keys]
        self._host_rules = None if self._projects else HostRules(host=host, allowed_hosts=allowed_hosts)
        # The keys that were presented and are valid. A dict compares two keys only if their secret hashes are equal, so
        # this lookup reveals nothing either.
        self._verified: dict[bytes, str] = {}

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise HostNotAllowed if the server has no keys and the request is for a host name that it does not accept.

        A request without `Host` is accepted. Browsers always send it.
        """
        if self._host_rules is not None and (header := headers.get(b"host")) is not None:
            self._host_rules.check(header)

    def authenticate(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the project of the key in the headers. Raises InvalidApiKey or OriginNotAllowed."""
        if not self._projects:
            origin = headers.get(b"origin")
            if origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower():
                raise OriginNotAllowed("Web pages of other origins need an API key: set api_keys.")
            return DEFAULT_PROJECT
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise InvalidApiKey("No API key was given: send it in the header 'Authorization: Bearer KEY'.")
        project = self._verified.get(key)
        if project is None:
            project = self._verified[key] = self._verify(key)
        return project

    def _verify(self, key: bytes) -> str:
        # All keys are compared, in constant time, so that the duration reveals nothing about them.
        presented = _digest(key)
        matches = [project for digest, project in self._projects if hmac.compare_digest(digest, presented)]
        if not matches:
            raise InvalidApiKey("The API key is not valid.")
        return matches[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
