"""The proxy that the environment names for a server."""

from dataclasses import dataclass

from antiphon.upstream.http1.request import Origin, parse_origin


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. It gets requests to http servers in absolute form, and CONNECT for https servers."""

    origin: Origin

    @property
    def headers(self) -> dict[str, str]:
        """The headers for the proxy itself."""
        value = self.origin.authorization
        return {"Proxy-Authorization": value} if value is not None else {}


def find_proxy(origin: Origin) -> Proxy | None:
    """Return the proxy for a server by `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, or None. Raises InvalidUrl."""
    from urllib.request import getproxies, proxy_bypass

    url = getproxies().get(origin.scheme)
    if not url or proxy_bypass(origin.host) or proxy_bypass(origin.authority):
        return None
    return Proxy(parse_origin(url if "://" in url else f"http://{url}"))
