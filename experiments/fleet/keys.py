"""Certificates and keys of a fleet: a certificate authority, the SuperLink's certificate, a key for each SuperNode."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# The SuperLink's own helper processes reach it by these, whatever its public name.
_LOOPBACK = ("localhost", "127.0.0.1")
_BACKDATED = datetime.timedelta(hours=1)  # clocks of a fleet differ


def make_keys(folder: Path, *, hosts: Sequence[str], nodes: int, days: int = 365) -> list[str]:
    """Write what a fleet with TLS and SuperNode authentication needs.

    ==========================  =====================================================================
    ``ca.pem``                  the authority's certificate: to everybody
    ``superlink.pem``, ``.key`` the SuperLink's certificate and private key: to the SuperLink's machine
    ``node-<i>``                the private key of SuperNode i: to its machine alone
    ``node-<i>.pub``            its public key: to whoever registers it
    ==========================  =====================================================================

    Files that are there are kept: another call adds nodes to a fleet. The authority's private key is thrown away, so
    nobody can issue a second certificate; a new SuperLink certificate takes a new folder.

    Parameters
    ----------
    folder : Path
        Created where missing, for its owner alone.
    hosts : sequence of str
        Names and IP addresses by which SuperNodes and people reach the SuperLink, besides loopback's.
    nodes : int
        How many SuperNodes there are.
    days : int
        How long the certificates hold.

    Returns
    -------
    list of str
        The names of the files written.

    Raises
    ------
    ValueError
        If a number is not at least 1, a name cannot stand in a certificate, or the folder's certificate lacks one.
    """
    if nodes < 1 or days < 1:
        raise ValueError(f"there must be at least one node and one day, not nodes={nodes} and days={days}.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    written = []
    if (folder / "ca.pem").exists():
        _require_names(folder / "superlink.pem", hosts)
    else:
        for name, data in _certificates(list(dict.fromkeys([*_LOOPBACK, *hosts])), days).items():
            _write(folder / name, data)
            written.append(name)
    for number in range(nodes):
        if (folder / f"node-{number}").exists():
            continue
        key = ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        _write(folder / f"node-{number}.pub", public + f" node-{number}\n".encode())
        _write(folder / f"node-{number}", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        written += [f"node-{number}", f"node-{number}.pub"]
    return written


def _certificates(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    """Return the files of an authority and of the one certificate it issues, the authority's own last."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink")])
    key_id = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        _builder(issuer, issuer, authority.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(issues=True), critical=True)
        .add_extension(key_id, critical=False)
        .sign(authority, hashes.SHA256())
    )
    leaf = (
        _builder(subject, issuer, server.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(issues=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), critical=False)
        .sign(authority, hashes.SHA256())
    )
    return {
        "superlink.key": server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "superlink.pem": leaf.public_bytes(Encoding.PEM),
        "ca.pem": root.public_bytes(Encoding.PEM),
    }


def _require_names(certificate: Path, hosts: Sequence[str]) -> None:
    named = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    names = set(named.get_extension_for_class(x509.SubjectAlternativeName).value)
    for host in hosts:
        if _name(host) not in names:
            raise ValueError(f"{certificate} does not name {host}; make all keys anew, in another folder.")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, issues: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not issues,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=issues,
        crl_sign=issues,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if any(character in host for character in "/: "):
        raise ValueError(f"{host!r} is neither an IP address nor a name; leave out scheme, port and path.")
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ValueError(f"{host!r} is neither an IP address nor a name in ASCII: {error}.") from error


def _write(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    temporary.replace(path)
