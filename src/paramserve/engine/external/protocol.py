"""What agent and fleet tell each other: plain data in the frames of the transport."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np
from msgspec import Struct

from paramserve.messages import decoder
from paramserve.transport.framing import ByteArray

AGENT: Final = "agent"
"""`Hello.role` of an agent."""

Ending: TypeAlias = Literal["stop", "kill"]
"""In order, or at once."""


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """First frame of an agent: what it can run."""

    pid: int
    host: str
    """Its host's name, for messages."""
    train: str
    """The training function that it was started with, as "module:function"; empty: none."""
    rules: tuple[str, ...]
    """The rules that it was started with, each as "module:Class"."""


class Assign(Struct, frozen=True, array_like=True, tag="assign"):
    """The agent's role. The frame's payload is what the role is told."""

    name: str
    entry: str
    reference: str
    secret: bytes
    """Sealed; see `sealing`."""
    environment: dict[str, str]
    payload_bytes: int


class Order(Struct, frozen=True, array_like=True, tag="order"):
    """End the role. An agent without one ends in order."""

    what: Ending


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """The role's process runs."""

    pid: int


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """The role called `Bootstrap.report`. The frame's payload is the body."""

    kind: str
    body_bytes: int


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The role's process has ended; the agent waits until the fleet hangs up, and ends too."""

    status: int


decode_agent = decoder(Offer | Started | Report | Finished).decode


def as_payload(data: bytes) -> tuple[ByteArray, ...]:
    """Bytes as the payload of a frame; none for no bytes."""
    return (np.frombuffer(data, np.uint8),) if data else ()
