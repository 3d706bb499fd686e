"""Hides the cluster's credentials on their way to an agent, with the token that both sides have."""

from __future__ import annotations

import hmac
import math
import secrets
from typing import Final

from paramserve.errors import NotAuthenticated

_SALT_BYTES: Final = 16
_BLOCK_BYTES: Final = 32


def seal(token: bytes, data: bytes) -> bytes:
    """Hide the cluster's credentials from whoever reads along where there is no TLS.

    They are all that is hidden: the rest of what crosses the connection holds no secret. The
    keys come from the token and a fresh salt; HMAC-SHA256 over a counter is the key stream, and
    HMAC-SHA256 over salt and text the tag.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    text = _mixed(token, salt, data)
    return salt + _tag(token, salt, text) + text


def unseal(token: bytes, sealed: bytes) -> bytes:
    """What was sealed. Raises `NotAuthenticated` if it was with another token, or was changed."""
    salt = sealed[:_SALT_BYTES]
    tag = sealed[_SALT_BYTES : _SALT_BYTES + _BLOCK_BYTES]
    text = sealed[_SALT_BYTES + _BLOCK_BYTES :]
    if not hmac.compare_digest(tag, _tag(token, salt, text)):
        raise NotAuthenticated(
            "the credentials of a role were not sealed with this agent's token",
            fix="give driver and agents the same token file",
        )
    return _mixed(token, salt, text)


def _mixed(token: bytes, salt: bytes, data: bytes) -> bytes:
    key = hmac.digest(token, b"external: stream" + salt, "sha256")
    blocks = range(math.ceil(len(data) / _BLOCK_BYTES))
    stream = b"".join(hmac.digest(key, block.to_bytes(8, "little"), "sha256") for block in blocks)
    return bytes(one ^ other for one, other in zip(data, stream, strict=False))


def _tag(token: bytes, salt: bytes, text: bytes) -> bytes:
    key = hmac.digest(token, b"external: tag" + salt, "sha256")
    return hmac.digest(key, salt + text, "sha256")
