"""A cluster on hosts of a network, and what its workers did as a `History`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.network.hosts import Network, Process

from paramserve_testing import Call, History, Part, Row

PORT = 7711
CLOCKS = 40


class Servers:
    """Two servers, each on a host of its own; the first is the coordinator."""

    def __init__(
        self,
        network: Network,
        token: str,
        *,
        workers: int,
        sync: bool = False,
        deadlines: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        self.network = network
        self.token = token
        self.sync = sync
        self.workers = workers
        network.host("s0")
        network.host("s1")
        self.address = f"10.77.0.1:{PORT}"
        settings = {"token": token, "sync": sync, "deadlines": deadlines}
        self.first = network.run(
            "s0",
            "server",
            bind=self.address,
            servers=2,
            workers=workers,
            **settings,
            **options,
        )
        self.first.wait("ready")
        self.second = network.run(
            "s1", "server", bind=f"10.77.0.2:{PORT}", join=self.address, **settings
        )
        self.second.wait("ready")

    def work(
        self,
        host: str,
        rank: int,
        *,
        writer: int | None = None,
        writers: int | None = None,
        clocks: int = CLOCKS,
        pause_s: float = 0.03,
        **options: Any,
    ) -> Process:
        """Start a worker that counts."""
        return self.network.run(
            host,
            "worker",
            address=self.address,
            token=self.token,
            rank=rank,
            workers=self.workers,
            writer=rank if writer is None else writer,
            writers=self.workers if writers is None else writers,
            clocks=clocks,
            pause_s=pause_s,
            sync=self.sync,
            **options,
        )

    def watch(self) -> Process:
        """Start a process beside the coordinator that tells who belongs to the cluster."""
        found = self.network.run("s0", "watcher", address=self.address, token=self.token)
        found.wait("ready")
        return found

    def history(self, workers: Sequence[Process], writers: int | None = None) -> History:
        """What the workers were told, and what the servers hold now."""
        count = self.workers if writers is None else writers
        asked = self.network.run(
            "s0", "reader", address=self.address, token=self.token, writers=count
        )
        asked.finish()
        found = History(self.sync, tuple(range(self.workers)))
        found.final = parts(asked.all("final")[0])
        for process in workers:
            calls: dict[int, Call] = {}
            for line in process.told():
                if "call" in line:
                    told = line["call"]
                    call = Call(**{**told, "blocks": frozenset(told["blocks"])}, tick=True)
                    calls[call.number] = call
                    found.calls.append(call)
                elif "answer" in line:
                    told = line["answer"]
                    call = calls[told["number"]]
                    call.answered = told["at"]
                    call.error = told.get("error", "")
                    call.applied = told.get("applied", "")
                    call.skipped = told.get("skipped", False)
                    call.reads = parts(told.get("reads", ()))
        found.calls.sort(key=lambda call: call.issued)
        return found


def parts(rows: Sequence[Any]) -> dict[Part, Row]:
    """Rows as a process tells them."""
    return {
        Part(block, shard): Row(tuple(counts), tuple(pushes), sound)
        for block, shard, counts, pushes, sound in rows
    }


def everything(history: History, clocks: int = CLOCKS) -> None:
    """Require that each part holds every push of every writer once."""
    assert history.final
    for part, row in history.final.items():
        assert row.counts == (clocks,) * len(row.counts), part
        assert row.pushes == ((1 << clocks) - 1,) * len(row.pushes), part
