"""The rule for URLs of clients."""

import ipaddress

import pytest

from antiphon.errors import ConfigError, InvalidRequest
from antiphon.upstream.addresses import OutboundRules

NO_EXCEPTIONS = OutboundRules()

PUBLIC = [
    "https://example.com/a.png",
    "HTTP://Example.COM:8080/a.png?x=http://127.0.0.1/#y",
    "https://user:pw@example.com/",
    "https://8.8.8.8/a.png",
    "https://[2606:4700::1111]/a.png",
    "https://134744072/",  # 8.8.8.8
    "https://[::ffff:8.8.8.8]/",
    "https://[64:ff9b::8.8.8.8]/",
    "https://bücher.example/a.png",
    "https://localhost.example.com/",
    "https://127.0.0.1.example.com/",
    "https://internal.example.com/",
    "https://example.com/a b.png",
]

PRIVATE = [
    "http://127.0.0.1/",
    "http://127.0.0.1:8080/a.png",
    "http://127.1/",
    "http://127.0.1/",
    "http://0x7f.1/",
    "http://0X7F000001/",
    "http://0x7f.0x0.0x0.0x1/",
    "http://2130706433/",
    "http://017700000001/",
    "http://0177.0.0.1/",
    "http://010.0.0.1/",  # 8.0.0.1 in octal, 10.0.0.1 in decimal
    "http://0/",
    "http://0.0.0.0/",
    "http://127.0.0.1./",
    "http://127%2e0%2E0%2e1/",
    "http://%31%32%37.0.0.1/",
    "http://１２７.０.０.１/",
    "http://127。0。0。1/",
    "http://①②⑦.0.0.1/",
    "http://10.1.2.3/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://169.254.43518/",
    "http://192.0.0.192/",
    "http://198.18.0.1/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://[::1]/",
    "http://[::]/",
    "http://[0:0:0:0:0:0:0:1]:80/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::127.0.0.1]/",
    "http://[::ffff:0:127.0.0.1]/",
    "http://[64:ff9b::169.254.169.254]/",
    "http://[64:ff9b:1::1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:1:2:3:4:80ff:fffe]/",  # Teredo: the complement of 127.0.0.1
    "http://[fe80::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[fc00::1]/",
    "http://[fec0::1]/",
    "http://[fd00:ec2::254]/",
    "http://[ff02::1]/",
    "http://localhost/",
    "http://LOCALHOST:80/",
    "http://localhost./",
    "http://localhost%2e/",
    "http://foo.localhost/",
    "http://ⓛocalhost/",
    "http://localhost.localdomain/",
    "http://ip6-loopback/",
    "http://printer.local/",
    "http://metadata.google.internal/",
    "http://metadata/",
    "http://redis:6379/",
    "http://kubernetes.default.svc/",
    "http://db.corp/",
    "http://router.home.arpa/",
    "http://example.com@127.0.0.1/",
    "http://a:b@c@127.0.0.1/",
]

MALFORMED = [
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "file:/etc/passwd",
    "ftp://example.com/",
    "gopher://example.com/",
    "gs://bucket/a",
    "jar:http://example.com!/",
    "javascript:alert(1)",
    "/etc/passwd",
    "//example.com/a.png",
    "example.com/a.png",
    "",
    " http://example.com/",
    "http:/example.com/",
    "http:///example.com/",
    "http:example.com/",
    "http:\\\\example.com/",
    "http:/\\example.com/",
    "http://",
    "http:///",
    "http://exa mple.com/",
    "http://example.com\n/",
    "http://exa\tmple.com/",
    "http://example.com\x00/",
    "http://[::1/",
    "http://[zz]/",
    "http://127.0.0.256/",
    "http://1.2.3.4.5/",
    "http://256.256.256.256/",
    "http://4294967296/",
    "http://0x100000000/",
    "http://08.1.1.1/",
    "http://example.1/",
    "http://%00/",
    "http://a%2fb/",
    "http://" + "a" * 20_000 + ".com/",
]


@pytest.mark.parametrize("url", PUBLIC)
def test_public_url_is_allowed(url: str) -> None:
    assert NO_EXCEPTIONS.find_fault(url) is None


@pytest.mark.parametrize("url", PRIVATE)
def test_private_url_is_refused(url: str) -> None:
    assert "private network" in (NO_EXCEPTIONS.find_fault(url) or "")


@pytest.mark.parametrize("url", MALFORMED)
def test_other_url_is_refused(url: str) -> None:
    fault = NO_EXCEPTIONS.find_fault(url)
    assert fault is not None
    assert "private network" not in fault


def test_backslash_in_the_authority_ends_it() -> None:
    assert NO_EXCEPTIONS.find_fault("http://127.0.0.1\\@example.com/") is not None


@pytest.mark.parametrize(
    ("entries", "url", "is_allowed"),
    [
        (["127.0.0.1"], "http://127.1:8000/", True),
        (["127.0.0.1"], "http://127.0.0.2/", False),
        (["127.0.0.1"], "http://localhost/", False),
        (["localhost"], "http://LOCALHOST./a", True),
        (["localhost"], "http://a.localhost/", False),
        (["localhost"], "http://127.0.0.1/", False),
        (["10.0.0.0/8"], "http://10.9.8.7/", True),
        (["10.0.0.0/8"], "http://[::ffff:10.9.8.7]/", True),
        (["10.0.0.5/8"], "http://11.0.0.1.local/", False),
        (["0x7f.1"], "http://2130706433/", True),
        (["fd00::/8", " images.corp "], "http://[fd12::1]/", True),
        (["fd00::/8", " images.corp "], "http://images.corp/a.png", True),
        (["[::1]"], "http://[::1]:80/", True),
        (["10.0.0.0/8"], "file:///etc/passwd", False),
    ],
)
def test_configured_hosts_and_networks_are_allowed(entries: list[str], url: str, is_allowed: bool) -> None:
    assert (OutboundRules.parse(entries).find_fault(url) is None) is is_allowed


@pytest.mark.parametrize("entry", ["http://10.0.0.1", "10.0.0.0/33", "a b", "", "host:80", "*"])
def test_invalid_entry_is_a_config_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="outbound_allow"):
        OutboundRules.parse([entry])


def test_resolved_address_is_checked() -> None:
    rules = OutboundRules.parse(["10.0.0.0/8"])
    addresses = ["8.8.8.8", "10.1.1.1", "127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2606:4700::1111"]
    allowed = [rules.is_address_allowed(ipaddress.ip_address(each)) for each in addresses]
    assert allowed == [True, True, False, False, True, True]


def test_refusal_names_the_param_and_the_setting() -> None:
    NO_EXCEPTIONS.check("data:image/png;base64,AAAA", "input[0]")
    with pytest.raises(InvalidRequest) as raised:
        NO_EXCEPTIONS.check("http://127.0.0.1/", "input[0].content[1].image_url", code="invalid_image_url")
    assert (raised.value.param, raised.value.code) == ("input[0].content[1].image_url", "invalid_image_url")
    assert "'outbound_allow'" in raised.value.message
