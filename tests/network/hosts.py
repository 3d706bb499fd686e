"""Hosts on one machine: network namespaces on a bridge, with links that can be cut and spoiled.

A host has one interface with an address of its own and its loopback. Its link is a pair of veth
devices whose other end is a port of the bridge; or, where packets are to be lost and delayed, a
wire: a process that carries frames between two TAP devices (many kernels have no `netem`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
SUBNET = "10.77.0"
CUTS = {
    # A switch that forwards nothing more: silence, as of a host without power.
    "silent": (("nomaster",), ("master", "br0")),
    # A cable that is pulled: both ends know that the carrier is gone.
    "unplugged": (("down",), ("up",)),
}


def ip(*args: str) -> None:
    """Run `ip`; an error shows what it said."""
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")


def missing() -> str:
    """Why no namespaces can be made here; empty: they can."""
    if os.geteuid() != 0:
        return f"this needs root, and runs as user {os.geteuid()}"
    if shutil.which("ip") is None:
        return "this needs the command ip (iproute2)"
    name = f"ps-{secrets.token_hex(4)}-probe"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "name", "br0", "type", "bridge")
            ip("-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
        finally:
            ip("netns", "del", name)
    except RuntimeError as error:
        return f"this kernel or container lets no network namespaces be made: {error}"
    return ""


def without_qdisc(kind: str, *options: str) -> str:
    """Why the kernel cannot shape with a qdisc; empty: it can."""
    if shutil.which("tc") is None:
        return "this needs the command tc (iproute2)"
    name = f"ps-{secrets.token_hex(4)}-probe"
    ip("netns", "add", name)
    try:
        command = ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", kind, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        ip("netns", "del", name)
    return f"this kernel has no qdisc {kind}: {done.stderr.strip()}" if done.returncode else ""


def without_wires() -> str:
    """Why no wire can be laid; empty: it can."""
    if Path("/dev/net/tun").exists():
        return ""
    return "this kernel or container has no /dev/net/tun"


def without_resets() -> str:
    """Why connections cannot be broken from outside; empty: they can."""
    if shutil.which("ss") is None:
        return "this needs the command ss (iproute2)"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            here = client.getsockname()[1]
            subprocess.run(
                ["ss", "-K", "-t", "sport", "=", str(here), "and", "dport", "=", str(port)],
                capture_output=True,
                check=False,
            )
            try:
                client.sendall(b"?")
            except ConnectionError:
                return ""
    return "this kernel breaks no connections (INET_DIAG_DESTROY)"


class Process:
    """A process on a host, and what it has told."""

    def __init__(self, name: str, pid: int, path: Path) -> None:
        self.name = name
        self.pid = pid
        self._path = path
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # ended already
            self._fd = -1

    def told(self) -> list[dict[str, Any]]:
        """All lines so far."""
        if not self._path.exists():
            return []
        whole, _, _ = self._path.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]

    def all(self, key: str) -> list[Any]:
        """The values of a key, in order."""
        return [line[key] for line in self.told() if key in line]

    def wait(self, key: str, found: Callable[[Any], bool] = bool, limit_s: float = 30.0) -> Any:
        """The first value of a key for which `found` holds.

        Fails the test if the process has ended without it, or when `limit_s` is over.
        """
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.ended()  # before reading: what it said last counts
            for value in self.all(key):
                if found(value):
                    return value
            assert not ended, f"{self} ended without {key}: {self.told()[-3:]}"
            assert time.monotonic() < deadline, f"{self} tells no {key}: {self.told()[-3:]}"
            time.sleep(0.01)

    def ended(self, limit_s: float = 0.0) -> bool:
        """Whether it has ended, after at most `limit_s`."""
        return self._fd < 0 or bool(select.select([self._fd], [], [], limit_s)[0])

    def finish(self, limit_s: float = 45.0) -> None:
        """Wait for its end, which must be in order."""
        assert self.ended(limit_s), f"{self} has not ended in {limit_s} s: {self.told()[-3:]}"
        assert self.all("returned"), f"{self} failed: {self.told()[-3:]}"

    def error(self, limit_s: float = 30.0) -> tuple[str, str]:
        """The kind and text of the error that it ends with."""
        assert self.ended(limit_s), f"{self} has not ended in {limit_s} s: {self.told()[-3:]}"
        assert self.all("error"), f"{self} did not fail: {self.told()[-3:]}"
        return self.all("error")[-1], self.all("text")[-1]

    def signal(self, number: signal.Signals) -> None:
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        if self._fd >= 0:
            self.ended(5.0)
            os.close(self._fd)
            self._fd = -1

    def __repr__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Keeper:
    """The process of `tests.network.keeper`; one for all tests of a module."""

    def __init__(self) -> None:
        self.prefix = f"ps-{secrets.token_hex(4)}"
        command = [sys.executable, "-m", "tests.network.keeper", self.prefix]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._read() != "loaded":
            self.close()
            raise RuntimeError("the keeper did not start; its output says why")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(
        self, namespace: str, function: str, file: Path, arguments: dict[str, Any]
    ) -> Process:
        order = {
            "namespace": namespace,
            "function": function,
            "file": str(file),
            "arguments": arguments,
        }
        orders: IO[str] | None = self._process.stdin
        assert orders is not None
        orders.write(json.dumps(order) + "\n")
        orders.flush()
        where = namespace if namespace else "this machine"
        return Process(f"{function} on {where}", int(self._read()), file)

    def close(self) -> None:
        """End it, and with it everything that is left of its networks."""
        self._process.communicate(timeout=30)


class Network:
    """A bridge and its hosts, for one test."""

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self._keeper = keeper
        self._folder = folder
        self._id = f"{keeper.prefix}-{secrets.token_hex(2)}"
        self._hub = f"{self._id}-hub"
        self._addresses: dict[str, str] = {}
        self._cuts: dict[str, str] = {}
        self._processes: list[Process] = []
        ip("netns", "add", self._hub)
        ip("-n", self._hub, "link", "add", "name", "br0", "type", "bridge")
        ip("-n", self._hub, "link", "set", "dev", "br0", "up")

    def host(self, name: str, *, wire: dict[str, Any] | None = None) -> str:
        """A new host; returns its address. `wire`: what `roles.wire` does to its packets."""
        namespace = self._namespace(name)
        self._addresses[name] = address = f"{SUBNET}.{len(self._addresses) + 1}"
        ip("netns", "add", namespace)
        ip("-n", namespace, "link", "set", "dev", "lo", "up")
        if wire is None:
            peer = ("peer", "name", name, "netns", self._hub)
            ip("-n", namespace, "link", "add", "name", "eth0", "type", "veth", *peer)
        else:
            process = self.run("hub", "wire", namespace=namespace, port=name, **wire)
            process.wait("ready")
        ip("-n", self._hub, "link", "set", "dev", name, "master", "br0", "up")
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "dev", "eth0", "up")
        return address

    def _namespace(self, name: str) -> str:
        return f"{self._id}-{name}"

    def run(self, host: str, function: str, **arguments: Any) -> Process:
        """Start a function of `roles` on a host."""
        path = self._folder / f"{len(self._processes)}-{function}-{host}"
        process = self._keeper.start(self._namespace(host), function, path, arguments)
        self._processes.append(process)
        return process

    def cut(self, host: str, how: str = "silent") -> None:
        """Nothing goes to or comes from a host any more."""
        self._cuts[host] = how
        ip("-n", self._hub, "link", "set", "dev", host, *CUTS[how][0])

    def heal(self, host: str) -> None:
        """The link of a host is as before the cut."""
        ip("-n", self._hub, "link", "set", "dev", host, *CUTS[self._cuts.pop(host)][1])

    def reset(self, host: str, address: str) -> None:
        """Break all TCP connections between a host and an address."""
        command = ["ip", "netns", "exec", self._namespace(host), "ss", "-K", "-t", "dst", address]
        subprocess.run(command, capture_output=True, check=True)

    def cap(self, host: str, rate: str) -> None:
        """Bound what a host sends, and what is sent to it, to a rate."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        for namespace, device in ((self._namespace(host), "eth0"), (self._hub, host)):
            command = ["tc", "-n", namespace, "qdisc", "add", "dev", device, *shape]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert not done.returncode, done.stderr

    def close(self) -> None:
        """Kill all processes and remove all namespaces."""
        for process in self._processes:
            process.close()
        for name in ("hub", *self._addresses):
            with contextlib.suppress(RuntimeError):
                ip("netns", "del", self._namespace(name))
