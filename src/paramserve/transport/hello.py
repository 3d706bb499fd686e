"""The client's side of a handshake: its hello, and whether the answer to that fits.

The server's side is in `handshake.py`; who may connect was settled before, in `dial.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from paramserve.errors import ProtocolError, rebuild
from paramserve.messages import Hello, Refused, Welcome, encode
from paramserve.transport.arena import NONCE_BYTES, Arena
from paramserve.transport.framing import prelude

_ANSWER: Final = msgspec.msgpack.Decoder(Welcome | Refused)


def hello_frame(hello: Hello, arenas: Sequence[Arena], bytes_max: int) -> bytes:
    """The frame of a hello with these arenas.

    Raises:
        ProtocolError: it would be longer than `bytes_max`.
    """
    named = tuple((arena.number, arena.nbytes) for arena in arenas)
    header = encode(msgspec.structs.replace(hello, arenas=named, nonce=b""))
    data = prelude(len(header), 0) + header
    if len(data) > bytes_max:
        raise ProtocolError(
            f"a hello of {len(data)} bytes was not sent, the limit is {bytes_max}",
            fix="use fewer arenas, or raise handshake_bytes_max",
        )
    return data


def write_nonce(arenas: Sequence[Arena]) -> bytes:
    """Write a nonce to the start of the last arena, for the server to read; empty without one."""
    if not arenas:
        return b""
    nonce = secrets.token_bytes(NONCE_BYTES)
    arenas[-1].memory[:NONCE_BYTES] = memoryview(nonce)
    return nonce


def check_answer(reply: bytes, nonce: bytes) -> None:
    """Whether the answer to a hello is a welcome by a peer that has read this nonce.

    Raises:
        ProtocolError: it is no answer, or the memory is not shared.
        ParamServeError: the peer refused the hello; this is its error.
    """
    try:
        answer = _ANSWER.decode(reply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"the answer to a hello was no welcome: {error}",
            fix="run the same version of paramserve on both sides",
        ) from error
    if isinstance(answer, Refused):
        raise rebuild(answer.kind, answer.failed, answer.applied, answer.fix)
    if answer.nonce != nonce:
        raise ProtocolError(
            "the server read another nonce than was written: the memory is not shared",
            fix="nothing; TCP is used where there is an address for it",
        )
