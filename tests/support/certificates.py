"""Certificates for TLS servers under test, signed by an authority of the test."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


class Authority:
    """A certificate authority. `path` is its certificate in PEM format."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        now = datetime.now(UTC)
        usage = dict.fromkeys(
            (
                "digital_signature",
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        certificate = (
            self._start(self._name, self._key, now - DAY, now + DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / "authority.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def make_server_context(self, *names: str, expired: bool = False) -> ssl.SSLContext:
        """Return a server's context with a certificate for these host names and addresses."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.write_certificate(*names, expired=expired))
        return context

    def write_certificate(self, *names: str, expired: bool = False) -> Path:
        """Write a key and a certificate for these host names and addresses into one file, and return its path."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        end = now - DAY if expired else now + DAY
        common = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        certificate = (
            self._start(common, key, end - 2 * DAY, end)
            .add_extension(x509.SubjectAlternativeName([_make_name(name) for name in names]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        path = self._folder / f"{certificate.serial_number}.pem"
        path.write_bytes(key.private_bytes(pem, *form) + certificate.public_bytes(pem))
        return path

    def _start(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, begin: datetime, end: datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
        )


def _make_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
