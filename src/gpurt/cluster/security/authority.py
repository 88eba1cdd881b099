"""Certificates: making an authority, and issuing from it.

Keys are of curve P-256: small, quick, and in every TLS library. A hub's certificate is for servers only and everybody
else's for clients only, so that a node's key cannot play the hub.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Final

from gpurt.cluster.security.errors import CredentialsRefused

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS: Final = 3650
DAYS: Final = 365
"""A certificate's validity."""
EARLY: Final = timedelta(hours=1)
"""Certificates are valid from this long before they are made: clocks of a cluster differ."""


class Role(StrEnum):
    HUB = "hub"
    """Where all connect; the master's own process, or one that only passes on."""
    NODE = "node"
    """Speaks for itself alone."""
    MASTER = "master"
    """Reads everything and gives commands, through a hub that runs elsewhere."""
    OBSERVER = "observer"
    """Reads everything."""


@dataclass(frozen=True, slots=True)
class Issued:
    """PEM."""

    certificate: bytes
    key: bytes
    not_after: datetime


def load_cryptography() -> ModuleType:
    """
    Raises:
        CredentialsRefused: it is not installed.
    """
    try:
        import cryptography
    except ImportError as exc:
        raise CredentialsRefused(
            f"certificates need the library cryptography: {exc}", hint="pip install 'gpurt[cluster,secure]'"
        ) from exc
    return cryptography


def make_authority(cluster: str, *, now: datetime | None = None) -> Issued:
    """The authority of a cluster."""
    load_cryptography()
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = now or datetime.now(UTC)
    key = _new_key()
    # A name of its own, or what another authority has issued would be told to have a wrong signature.
    mark = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:16]
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster),
            x509.NameAttribute(NameOID.COMMON_NAME, f"gpurt cluster authority {mark}"),
        ]
    )
    not_after = now + timedelta(days=AUTHORITY_DAYS)
    builder = _builder(name, name, key, now, not_after)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return _sign(builder, key, key, not_after)


def issue(
    authority: Issued,
    *,
    cluster: str,
    name: str,
    role: Role,
    hosts: Sequence[str] = (),
    days: float = DAYS,
    now: datetime | None = None,
) -> Issued:
    """A certificate with a new key.

    Args:
        name: its common name.
        hosts: names and addresses under which others reach it.
        days: of validity; never longer than the authority's own.
    """
    load_cryptography()
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = now or datetime.now(UTC)
    certificate, signer = load_certificate(authority.certificate), load_key(authority.key)
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    key = _new_key()
    not_after = min(now + timedelta(days=days), certificate.not_valid_after_utc)
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if role is Role.HUB else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _builder(subject, certificate.subject, key, now, not_after)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(issuer, critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return _sign(builder, key, signer, not_after)


def load_certificate(pem: bytes) -> x509.Certificate:
    """
    Raises:
        ValueError: not a certificate.
    """
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem)


def load_key(pem: bytes) -> EllipticCurvePrivateKey:
    """
    Raises:
        ValueError: not a private key of an elliptic curve, or encrypted.
    """
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as exc:  # a password is needed
        raise ValueError(str(exc)) from exc
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("not a key of an elliptic curve")
    return key


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, now: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign(
    builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey, signer: EllipticCurvePrivateKey, not_after: datetime
) -> Issued:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Issued(
        certificate=builder.sign(signer, SHA256()).public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        not_after=not_after,
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
