"""Certificates to try TLS with, made by the library trustme.

    python deploy/certificates.py DIR --host server-0.train --host server-1.train

One certificate and key serve on both sides: every process of a cluster shows the same one, and
takes what its authority has signed. The authority's own key is thrown away, so a set cannot grow;
make a new one for other hosts. For lasting use, take the certificates of your own authority.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from paramserve.config import TLS
from paramserve.errors import ParamServeError
from paramserve.transport.tcp import UNSENT4, UNSENT6, way_to

VALID_DAYS = 365
"""A set to try things with is not meant to outlive this; trustme's default is the year 3000."""


def make_certificates(directory: str | os.PathLike[str], hosts: Sequence[str] = ()) -> TLS:
    """Write ca.pem, cert.pem and key.pem: the same three files for servers and clients.

    Copy the folder to every host and give each process the returned paths. A process with key.pem
    can join the cluster as far as TLS is concerned.

    Args:
        directory: made if it is missing; only its owner may enter it (0700).
        hosts: names and addresses under which servers are dialled, also "*.name.domain".
            None given: `local_hosts()`.
    Returns:
        The three paths, absolute.
    Raises:
        ValueError: `hosts` is one string or holds what is no name or address. Nothing was written.
        ParamServeError: trustme is not installed, one of the files is there already, the folder
            holds other things and is open to others, or it cannot be written. The files that were
            there are unchanged; of this set nothing is left.
    """
    if isinstance(hosts, str):
        raise ValueError(f"hosts is a list of names, not the one string {hosts!r}")
    try:
        import trustme
    except ImportError as error:
        raise ParamServeError(
            "certificates were not made: the library trustme is not installed",
            fix="pip install trustme",
        ) from error

    wrong = [host for host in hosts if not _fits(host)]
    if wrong:
        raise ValueError(f"hosts: no host name or address: {wrong}")
    authority = trustme.CA(organization_name="paramserve")
    issued = authority.issue_cert(
        # A machine may have a name that no certificate can hold ("my_host"); it goes by address.
        *(hosts if hosts else filter(_fits, local_hosts())),
        organization_name="paramserve",
        not_after=datetime.now(UTC) + timedelta(days=VALID_DAYS),
    )
    folder = Path(directory).absolute()
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    contents = {
        folder / "ca.pem": authority.cert_pem.bytes(),
        folder / "cert.pem": chain,
        folder / "key.pem": issued.private_key_pem.bytes(),
    }
    _write(folder, contents)
    certificate_authority, certificate, key = map(str, contents)
    return TLS(certificate=certificate, key=key, authority=certificate_authority)


def local_hosts() -> list[str]:
    """The names and addresses under which this machine is dialled, loopback first."""
    found = ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    try:
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # the name is known to this machine only
        named = []
    found += [str(address[0]).partition("%")[0] for *_, address in named]
    for unsent in (UNSENT4, UNSENT6):
        with contextlib.suppress(OSError):  # no way out in this family
            found.append(way_to(unsent))
    return list(dict.fromkeys(found))


def _fits(host: str) -> bool:
    """Whether a certificate can name this host: an address, a name, or "*." and a name."""
    import idna

    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            idna.encode(host.removeprefix("*."), uts46=True)
        except ValueError:  # idna's own errors are UnicodeErrors, which are ValueErrors
            return False
    return True


def _write(folder: Path, contents: dict[Path, bytes]) -> None:
    """Write all files or none, each new and 0600."""
    there = [path for path in contents if path.is_symlink() or path.exists()]
    if there:
        raise ParamServeError(
            f"certificates were not made: {there[0]} is there already",
            fix="name another folder, or delete the old set on every host that uses it",
        )
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()) and folder.stat().st_mode & 0o077:
            raise ParamServeError(
                f"certificates were not made: {folder} holds other things and is open to others",
                fix="name a new folder",
            )
        folder.chmod(0o700)
        for path, content in contents.items():
            # O_EXCL: never through a link, and never over a file that came in between.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            written.append(path)
            with open(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ParamServeError(
            f"certificates were not made: cannot write in {folder}: {error}",
            fix="name a folder that is yours, on a disk with space left",
        ) from error


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Make a set of certificates for tests: ca.pem, cert.pem, key.pem."
    )
    made.add_argument("directory", metavar="DIR")
    made.add_argument(
        "--host",
        action="append",
        default=[],
        dest="hosts",
        help="a name or address of a server; repeatable (without it: those of this machine)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        made = make_certificates(options.directory, options.hosts)
    except (ParamServeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"use --tls-certificate {made.certificate} --tls-key {made.key} "
        f"--tls-authority {made.authority}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
