"""The addresses that a client may make this server, or an upstream for it, connect to.

A URL of a client must not lead to a service that only this host or its network can reach. `OutboundRules` decides by
the URL alone. A program that fetches a URL itself also checks the addresses that its host name resolves to, with
`OutboundRules.is_address_allowed`.
"""

import ipaddress
import re
import unicodedata
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import unquote

import msgspec

from antiphon.errors import ConfigError, InvalidRequest

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

SETTING = "outbound_allow"

# The scheme and the authority. Browsers read a backslash as a slash.
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*):(?P<slashes>[/\\]*)(?P<authority>[^/\\?#]*)", re.IGNORECASE)
_PORT = re.compile(r":\d*$")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+", re.IGNORECASE)
_DOTS = re.compile("[\u3002\uff0e\uff61]")  # other signs that count as a dot in a host name
_MAX_URL_LENGTH = 16 * 1024

# Names that resolve to this host, or only within its own network: RFC 6761, RFC 6762 (appendix G), RFC 8375, and names
# of cloud and container networks. A name without a dot is local as well.
_LOCAL_DOMAINS = (
    "localhost", "localhost6", "localdomain", "localdomain6", "local", "internal", "intranet", "private", "corp",
    "home", "home.arpa", "lan", "svc", "ip6-localhost", "ip6-loopback", "in-addr.arpa", "ip6.arpa",
)  # fmt: skip
# IPv6 networks whose addresses contain an IPv4 address, and the position of its first bit from the right.
_EMBEDDED = (
    (IPv6Network("::ffff:0:0/96"), 0),
    (IPv6Network("::/96"), 0),
    (IPv6Network("64:ff9b::/96"), 0),
    (IPv6Network("::ffff:0:0:0/96"), 0),
    (IPv6Network("2002::/16"), 80),
)
# Networks that not every version of Python counts as private: local NAT64, and protocol assignments with the metadata
# service of a cloud.
_MORE_PRIVATE = (IPv6Network("64:ff9b:1::/48"), IPv4Network("192.0.0.0/24"))
_TEREDO = IPv6Network("2001::/32")


class OutboundRules(msgspec.Struct, frozen=True):
    """The rules for URLs of clients. `hosts` and `networks` are allowed although they are private."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> "OutboundRules":
        """Parse the setting: host names, addresses and networks (CIDR). Raises ConfigError."""
        hosts: set[str] = set()
        networks: list[Network] = []
        for entry in entries:
            text = entry.strip()
            try:
                networks.append(ipaddress.ip_network(text.strip("[]"), strict=False))
                continue
            except ValueError:
                host = normalize_host(text)
            address = None if host is None else parse_address(host)
            if address is not None:
                networks.append(ipaddress.ip_network(address))
            elif host is None or not re.fullmatch(r"[\w.-]+", host):
                raise ConfigError(
                    f"{SETTING}: {entry!r} is not a host name, an address or a network such as 10.0.0.0/8."
                )
            else:
                hosts.add(host)
        return cls(frozenset(hosts), tuple(networks))

    def check(self, url: str, param: str, *, code: str = "invalid_value", allow_data: bool = True) -> None:
        """Raise InvalidRequest for a URL that may not be connected to. `param` is its param path."""
        if allow_data and url[:5].lower() == "data:":
            return
        fault = self.find_fault(url, allow_data=allow_data)
        if fault is not None:
            raise InvalidRequest(f"Invalid '{param}': {fault}", param=param, code=code)

    def find_fault(self, url: str, *, allow_data: bool = False) -> str | None:
        """Return the reason why a URL may not be connected to, or None. `allow_data`: it may also be a data URL."""
        if len(url) > _MAX_URL_LENGTH:
            return f"the URL is longer than {_MAX_URL_LENGTH} characters."
        found = _URL.match(url)
        if found is None or found["scheme"].lower() not in ("http", "https"):
            return f"the URL must start with {'http://, https:// or data:' if allow_data else 'http:// or https://'}."
        if found["slashes"] != "//" or not url.isprintable() or " " in found["authority"]:
            return "the URL is malformed."
        host = normalize_host(_PORT.sub("", found["authority"].rpartition("@")[2]))
        if host is None:
            return "the URL has no valid host name."
        address = parse_address(host)
        if address is None and _is_numeric(host):
            return "the URL has no valid host name."
        if host in self.hosts or (address is None and not _is_local_name(host)):
            return None
        if address is not None and self.is_address_allowed(address) and self._is_allowed_as_decimal(host):
            return None
        return f"the host is in a private network. The operator can allow it with the setting '{SETTING}'."

    def is_address_allowed(self, address: Address) -> bool:
        """Return True if an address is public, or one of `networks` contains it."""
        embedded = _find_embedded(address)
        if any(each in network for each in (address, *embedded) for network in self.networks):
            return True
        return not any(map(_is_private, (address, *embedded)))

    def _is_allowed_as_decimal(self, host: str) -> bool:
        """Check an address with leading zeros as decimal, too: programs disagree about 010.0.0.1."""
        parts = [part.lstrip("0") or "0" for part in host.split(".")]
        try:
            return self.is_address_allowed(IPv4Address(".".join(parts)))
        except ValueError:
            return True  # not such an address


def normalize_host(host: str) -> str | None:
    """Return a host name as resolvers read it: decoded, in small letters, without a dot at the end. None if invalid."""
    host = unicodedata.normalize("NFKC", _DOTS.sub(".", unquote(host)))
    host = _DOTS.sub(".", host).lower().rstrip(".")
    if not host.isascii():
        try:
            host = host.encode("idna").decode()
        except UnicodeError:
            return None
    if not host or not host.isprintable() or any(sign in host for sign in " /\\?#@<>^|`{}\"'"):
        return None
    return host


def parse_address(host: str) -> Address | None:
    """Return the address that a normalized host is, in any notation that resolvers accept. None for a name."""
    if host.startswith("["):
        host = host.removeprefix("[").removesuffix("]")
    if ":" in host:
        try:
            return IPv6Address(host.partition("%")[0])
        except ValueError:
            return None
    parts = host.split(".")
    if len(parts) > 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    *leading, last = map(_parse_number, parts)
    if last is None or any(number is None or number > 255 for number in leading):
        return None
    value = sum((number or 0) << (24 - 8 * index) for index, number in enumerate(leading))
    return IPv4Address(value + last) if last < 1 << (32 - 8 * len(leading)) else None


def _parse_number(text: str) -> int | None:
    """Parse a part of an address: decimal, octal with a leading 0, or hexadecimal with 0x."""
    try:
        if text[:2].lower() == "0x":
            return int(text[2:] or "0", 16)
        return int(text, 8 if text[0] == "0" else 10)
    except ValueError:
        return None


def _is_numeric(host: str) -> bool:
    """Return True for a host that must be an address: names do not end in a number, and have no colon."""
    return ":" in host or host.startswith("[") or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _is_local_name(host: str) -> bool:
    return "." not in host or any(host == domain or host.endswith(f".{domain}") for domain in _LOCAL_DOMAINS)


def _find_embedded(address: Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that an IPv6 address leads to."""
    if not isinstance(address, IPv6Address):
        return []
    value = int(address)
    embedded = [IPv4Address(value >> shift & 0xFFFFFFFF) for network, shift in _EMBEDDED if address in network]
    if address in _TEREDO:
        embedded.append(IPv4Address(~value & 0xFFFFFFFF))
    return embedded


def _is_private(address: Address) -> bool:
    if isinstance(address, IPv6Address) and any(address in network for network, _ in _EMBEDDED[2:]):
        return False  # the embedded address decides
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return False
    if any(address in network for network in _MORE_PRIVATE):
        return True
    return not address.is_global or address.is_multicast or _is_site_local(address)


def _is_site_local(address: Address) -> bool:
    return isinstance(address, IPv6Address) and address.is_site_local
