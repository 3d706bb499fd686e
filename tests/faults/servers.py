"""Servers that were started by themselves, each in a process of its own, over loopback."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from tests.network.hosts import Keeper, Process

SOON_S = 5.0
"""Until what was ended in order is gone, on a busy machine."""


def new_token(path: Path) -> str:
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return str(path)


class Servers:
    """Starts `ps.serve` in processes of its own."""

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self._keeper = keeper
        self._folder = folder
        self._processes: list[Process] = []
        self.token = new_token(folder / "token")

    def start(self, function: str, **arguments: Any) -> Process:
        path = self._folder / f"told-{len(self._processes)}"
        process = self._keeper.start("", function, path, arguments)
        self._processes.append(process)
        return process

    def serve(self, bind: str = "127.0.0.1:0", **options: Any) -> tuple[Process, str]:
        """A server that is ready, and its address."""
        process = self.start("server", bind=bind, **{"token": self.token, **options})
        return process, process.wait("ready")

    def pair(self, **options: Any) -> tuple[list[Process], str]:
        """The two servers of a cluster, and the first one's address."""
        first, address = self.serve(servers=2, **options)
        joins = {name: options[name] for name in ("until_done", "tls", "rules") if name in options}
        second, _ = self.serve(join=address, **joins)
        return [first, second], address

    def close(self) -> None:
        for process in self._processes:
            process.close()
