# SPDX-License-Identifier: Apache-2.0
"""A certificate for a SuperLink on this machine, and keys for its SuperNodes.

The certificate signs itself and is valid for a day: for trials, not for a deployment.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Key:
    """The files of a SuperNode's key: the private half, and the public one for the SuperLink."""

    private: Path
    public: Path


def make_key(folder: Path, name: str) -> Key:
    """Write a new key, in the format of OpenSSH."""
    key = ec.generate_private_key(ec.SECP384R1())
    files = Key(folder / name, folder / f"{name}.pub")
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write_private(files.private, private)
    files.public.write_bytes(public)
    return files


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and its key; return the paths of both."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    paths = folder / "certificate.pem", folder / "certificate.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(paths[1], private)
    return paths


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
