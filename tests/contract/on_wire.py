"""What of a client's memory travels between it and servers on other hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paramserve.client import Client


@contextmanager
def runs_sent(client: Client) -> Iterator[list[list[int]]]:
    """The sizes of the runs of each frame that a client sends."""
    exchange: Any = client.connection.exchange
    own, sent = exchange._frame, list[list[int]]()

    def watch(shard: Any, messages: Sequence[Any]) -> Any:
        header, runs = own(shard, messages)
        sent.append([nbytes for _, _, nbytes in runs])
        return header, runs

    exchange._frame = watch
    try:
        yield sent
    finally:
        del exchange._frame


def payloads_read(client: Client, shard: int = 0) -> list[int]:
    """The bytes of each payload that a client reads of a shard from now on."""
    link: Any = client.connection.exchange.shards[shard].link
    own, sizes = link.read_payload, list[int]()

    def watch() -> None:
        sizes.append(link.payload_bytes)
        own()

    link.read_payload = watch
    return sizes
