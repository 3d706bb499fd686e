"""The file that holds a cluster's token, as every process of it is given one.

A token in a file is shown by no list of processes and no environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from paramserve.config import NO_CREDENTIALS, TLS, Credentials
from paramserve.errors import ParamServeError
from paramserve.transport.auth import TOKEN_BYTES_MIN


def credentials_of(
    token_file: str | os.PathLike[str] | None, tls: TLS | None = None
) -> Credentials:
    """Credentials with the token that a file holds (64 hexadecimal digits, or any text).

    Raises:
        ParamServeError: it cannot be read, others may read it, or it holds no token.
    """
    if token_file is None:
        return Credentials(tls=tls) if tls is not None else NO_CREDENTIALS
    path = Path(token_file)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except OSError as error:
        raise ParamServeError(
            f"the token file {path} cannot be read: {error.strerror}",
            fix="make one with: paramserve token FILE",
        ) from error
    if mode & 0o007:
        raise ParamServeError(
            f"everybody on this machine may use the token file {path} (mode {mode & 0o777:o})",
            fix=f"chmod 600 {path}, and make a new token if others may have read it",
        )
    if len(token) < TOKEN_BYTES_MIN:
        raise ParamServeError(
            f"the token in {path} has {len(token)} characters, it needs {TOKEN_BYTES_MIN}",
            fix="make one with: paramserve token FILE",
        )
    return Credentials(token, tls)
