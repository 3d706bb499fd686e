"""Certificates for the transport's tests: made by trustme, in files, as users have them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from datetime import datetime
from pathlib import Path

import trustme

from paramserve.config import TLS


class Authority:
    """Signs certificates and writes them, with their keys and its own, as PEM files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca = trustme.CA()
        self._issued = 0
        self.path = str(directory / "ca.pem")
        self._ca.cert_pem.write_to_path(self.path)

    def issue(
        self,
        *hosts: str,
        trusts: Authority | None = None,
        check_host: bool = True,
        not_after: datetime | None = None,
    ) -> TLS:
        """A new certificate for these hosts, for a peer that trusts an authority (this one)."""
        self._issued += 1
        certificate = self._directory / f"cert{self._issued}.pem"
        key = self._directory / f"key{self._issued}.pem"
        made = self._ca.issue_cert(*hosts, not_after=not_after)
        certificate.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        authority = trusts.path if trusts is not None else self.path
        return TLS(str(certificate), str(key), authority, check_host)


@functools.cache
def trusted_authority() -> Authority:
    """The one that all peers trust, unless a test is about that."""
    directory = Path(tempfile.mkdtemp(prefix="paramserve-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Authority(directory)


@functools.cache
def trusted_tls() -> TLS:
    """What a peer on loopback has."""
    return trusted_authority().issue("localhost", "127.0.0.1", "::1")
