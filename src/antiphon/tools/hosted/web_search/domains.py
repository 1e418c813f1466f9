"""Domain filters of a web search."""

from urllib.parse import urlsplit

from msgspec import Struct

from antiphon.errors import InvalidRequest
from antiphon.protocol.tools import WebSearchFilters
from antiphon.upstream.addresses import normalize_host

MAX_DOMAINS = 100


class DomainFilter(Struct, frozen=True):
    """The domains that results may come from. A domain includes its subdomains. `allowed` is None for all."""

    allowed: tuple[str, ...] | None = None
    blocked: tuple[str, ...] = ()

    def allows(self, url: str) -> bool:
        """Return True if the host of a URL may be used."""
        try:
            host = normalize_host(urlsplit(url).hostname or "")
        except ValueError:
            return False
        if host is None or any(_is_within(host, domain) for domain in self.blocked):
            return False
        return self.allowed is None or any(_is_within(host, domain) for domain in self.allowed)


def read_filters(filters: WebSearchFilters | None, path: str) -> DomainFilter:
    """Return the filter of a tool. `path` is the param path of the tool. Raises InvalidRequest."""
    if filters is None:
        return DomainFilter()
    allowed = _read_domains(filters.allowed_domains, f"{path}.filters.allowed_domains")
    blocked = _read_domains(filters.blocked_domains, f"{path}.filters.blocked_domains")
    return DomainFilter(allowed or None, blocked)


def _read_domains(domains: list[str] | None, path: str) -> tuple[str, ...]:
    if domains is not None and len(domains) > MAX_DOMAINS:
        raise InvalidRequest(
            f"Invalid '{path}': at most {MAX_DOMAINS} domains are allowed, got {len(domains)}.",
            param=path,
            code="array_above_max_length",
        )
    return tuple(_read_domain(domain, f"{path}[{index}]") for index, domain in enumerate(domains or ()))


def _read_domain(domain: str, path: str) -> str:
    host = normalize_host(domain) if "/" not in domain and ":" not in domain else None
    if host is None:
        raise InvalidRequest(
            f"Invalid '{path}': expected a domain such as example.com, without a scheme and a path.",
            param=path,
            code="invalid_value",
        )
    return host.removeprefix("*.")


def _is_within(host: str, domain: str) -> bool:
    return host == domain or host.endswith(f".{domain}")
