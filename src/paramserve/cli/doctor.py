"""`paramserve doctor`: what of this machine, or of a cluster, will be slower or is missing."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from paramserve import __version__, kernel_folder
from paramserve.cli.cluster import tls_of, with_tls
from paramserve.cli.debug import ask_process
from paramserve.errors import ParamServeError
from paramserve.machine import cores, cpu_quota, memory_bytes
from paramserve.observe.amounts import in_bytes

Verdict = Literal["ok", "slower", "missing", "differs", "wrong"]
FILES_MIN = 4096
"""Open files: a server has one for each connection, and some for each arena."""
MEMORY_MIN = 2 << 30
SHARED_MIN = 64 << 20
"""Free bytes of /dev/shm below which `doctor` warns: torch's loaders put their batches there."""
WAKE_S_SLOW = 50e-6
"""Machines with quick wake-ups need 3 to 20 us; virtual ones up to some hundred."""
FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
"""Clock sources that are read without a system call."""
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
CONNECT_S = 5.0
SKEW_S = 1.0
"""Clocks that are further apart make logs and metrics of hosts hard to compare."""
EXTRAS = {
    "torch": "worker.optimizer, and torch's optimizers as rules",
    "ray": "ps.OnRay()",
    "pyarrow": "tables in Parquet files, Arrow columns",
    "fsspec": "checkpoints in object stores",
    "matplotlib": "result.plot()",
    "prometheus_client": "ps.Prometheus()",
    "tensorboard": "ps.TensorBoard()",
}
"""Packages that are not needed, and what needs them."""


class Finding(NamedTuple):
    """One thing that was looked at. `advice` is empty where all is well."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def of_machine() -> Iterator[Finding]:
    """What this machine has."""
    for look in (_python, _cores, _memory, _files, _shared_memory, _descriptors, _wakeups, _clock):
        yield look()
    yield _loopback()
    yield _kernels()
    yield from _packages()


def _python() -> Finding:
    versions = f"{sys.version.split()[0]} on {sys.platform}, paramserve {__version__}"
    if sys.platform != "linux":
        advice = "runs on Linux only are tested: shared memory between processes needs it"
        return Finding("python", "slower", versions, advice)
    return Finding("python", "ok", versions)


def _cores() -> Finding:
    quota, count = cpu_quota(), cores()
    text = f"{count}" + (f", of a quota of {quota:g}" if quota is not None else "")
    if count < 2:
        return Finding("cores", "slower", text, "a server and a worker take turns on one core")
    return Finding("cores", "ok", text)


def _memory() -> Finding:
    free = memory_bytes()
    if free is None:
        return Finding("memory", "ok", "not known on this system")
    if free < MEMORY_MIN:
        advice = "each process with torch takes some 300 MB: use fewer workers, or free memory"
        return Finding("memory", "slower", f"{in_bytes(free)} available", advice)
    return Finding("memory", "ok", f"{in_bytes(free)} available")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= FILES_MIN or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", f"{soft:,}")
    return Finding("open files", "wrong", f"{soft:,} (at most {hard:,})", f"ulimit -n {FILES_MIN}")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        advice = "DataLoaders with num_workers need it: mount a tmpfs there"
        return Finding("/dev/shm", "missing", str(error.strerror), advice)
    if free < SHARED_MIN:
        advice = "DataLoaders with num_workers need more: docker run --shm-size 1g, or an emptyDir"
        return Finding("/dev/shm", "slower", f"{in_bytes(free)} free", advice)
    return Finding("/dev/shm", "ok", f"{in_bytes(free)} free")


def _descriptors() -> Finding:
    """Memory without a name, and its descriptor sent to another process: how values travel between
    processes of one machine."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(f"\0paramserve-doctor-{os.getpid()}")
        os.close(os.memfd_create("paramserve-doctor"))
        pidfd = os.pidfd_open(os.getpid())
        os.close(pidfd)
    except (OSError, AttributeError) as error:
        advice = "processes of one machine use TCP, which copies: allow memfd_create and pidfd_open"
        return Finding("shared arenas", "slower", str(error), advice)
    return Finding("shared arenas", "ok", "memfd, unix sockets, pidfd")


def _wakeups() -> Finding:
    from paramserve.transport.wakeup import wake_s

    cost = wake_s()
    latency = f"{cost * 1e6:.0f} us"
    if cost > WAKE_S_SLOW:
        advice = (
            "virtual machines halt idle cores, and a small step waits that long for each answer; "
            "steps of some ms do not notice"
        )
        return Finding("wake-up of a thread", "slower", latency, advice)
    return Finding("wake-up of a thread", "ok", latency)


def _clock() -> Finding:
    try:
        source = CLOCK_SOURCE.read_text().strip()
    except OSError:
        return Finding("clock source", "ok", "not known on this system")
    if source not in FAST_CLOCKS:
        advice = f"each look at the clock is a system call: use {FAST_CLOCKS[0]}, if it is stable"
        return Finding("clock source", "slower", source, advice)
    return Finding("clock source", "ok", source)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), CONNECT_S).close()
    except OSError as error:
        return Finding(
            "loopback", "wrong", str(error), "allow TCP on 127.0.0.1: processes meet there"
        )
    return Finding("loopback", "ok", "TCP on 127.0.0.1")


def _kernels() -> Finding:
    """Where compiled kernels are kept."""
    folder, refused, trusted = kernel_folder.choose()
    because = "".join(f"; not in {each}" for each in refused)
    own = f"set {kernel_folder.VARIABLE} to a folder that only this user can write to"
    if folder is None:
        advice = f"what is not compiled yet, each run and process compiles anew, for seconds: {own}"
        read = f", read from {' and '.join(map(str, trusted))}" if trusted else ""
        return Finding("kernel cache", "slower", f"none to write to{because}{read}", advice)
    if kernel_folder.VARIABLE in os.environ and refused:
        return Finding("kernel cache", "differs", f"{folder}{because}", own)
    return Finding("kernel cache", "ok", str(folder))


def _packages() -> Iterator[Finding]:
    for name, use in EXTRAS.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield Finding(name, "missing", "not installed", f"for {use}: pip install {name}")
            continue
        yield Finding(name, "ok", installed + (_cuda() if name == "torch" else ""))


def _cuda() -> str:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return ", no GPU"
    return f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def of_token(path: str) -> Finding:
    """Check that a token file can be read, and by no other user."""
    from paramserve.transport.auth import credentials_of

    try:
        credentials_of(path, None)
    except ParamServeError as error:
        return Finding("token file", "wrong", error.failed, error.fix)
    return Finding("token file", "ok", path)


def of_cluster(address: str, token_file: str | None, tls: Any) -> Iterator[Finding]:
    """Whether a cluster is reached from here, and in which time; whether clocks agree."""
    from paramserve.config import Deadlines, Limits
    from paramserve.launch.connect import full_address
    from paramserve.launch.overview import Overview
    from paramserve.transport.auth import credentials_of
    from paramserve.transport.tcp import split_place

    host, port = split_place(address)
    began = time.perf_counter()
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        advice = "look whether `paramserve serve` runs there, and at firewalls between"
        yield Finding("reachable", "wrong", f"{address}: {error}", advice)
        return
    took_ms = (time.perf_counter() - began) * 1000
    yield Finding("reachable", "ok", f"{address} in {took_ms:.1f} ms")
    credentials = credentials_of(token_file, tls)
    try:
        began = time.time()
        about = ask_process([full_address(address)], credentials, coordinator=False, whole=False)
        ended = time.time()
    except ParamServeError as error:
        yield Finding("server", "wrong", error.failed, error.fix)
        return
    yield version_finding(about.versions)
    yield clock_finding(about.time_s, began, ended)
    overview = Overview(
        (full_address(address),),
        credentials,
        Limits(),
        Deadlines(),
        records=False,
        served=True,
    )
    try:
        began = time.perf_counter()
        latest = overview.fresh(CONNECT_S)
        took_ms = (time.perf_counter() - began) * 1000
    except ParamServeError as error:
        yield Finding("cluster", "wrong", error.failed, error.fix)
        return
    finally:
        overview.close()
    servers = f"{len(latest.servers)} of {max(latest.expected_servers, 1)} servers"
    live = sum(each.state == "live" for each in latest.members)
    text = f"{servers}, {live} of {len(latest.members)} workers, answer in {took_ms:.1f} ms"
    silent = [str(each) for each in latest.silent_servers]
    if silent:
        advice = "look whether these processes run: they have ended, or have not been heard of"
        yield Finding("cluster", "wrong", f"{text}; silent: shard {', '.join(silent)}", advice)
    else:
        yield Finding("cluster", "ok", text)


def version_finding(versions: Mapping[str, str]) -> Finding:
    """Whether a server runs what runs here."""
    there, python = versions.get("paramserve", "unknown"), versions.get("python", "unknown")
    text = f"paramserve {there} on python {python} there"
    if there != __version__:
        advice = f"here it is {__version__}: run one version of paramserve on all sides"
        return Finding("version", "differs", text, advice)
    return Finding("version", "ok", text)


def clock_finding(there_s: float, began_s: float, ended_s: float) -> Finding:
    """How far a server's clock is from this machine's.

    Args:
        there_s: what it showed, at a moment between `began_s` and `ended_s` here.
    """
    skew_s = there_s - (began_s + ended_s) / 2
    sure_s = (ended_s - began_s) / 2
    ahead = "ahead of" if skew_s > 0 else "behind"
    text = f"{abs(skew_s):.3f} s {ahead} this one, give or take {sure_s:.3f} s"
    if abs(skew_s) - sure_s > SKEW_S:
        advice = (
            "times in logs, metrics and checkpoints differ as much, and a new certificate may not "
            "be valid yet: run a time service, such as chrony, on all hosts"
        )
        return Finding("clock there", "differs", text, advice)
    return Finding("clock there", "ok", text)


@click.command()
@click.option("--address", metavar="HOST:PORT", help="A cluster that is to be reached from here.")
@click.option("--token-file", type=click.Path(), help="The cluster's token.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@with_tls
def doctor(address: str | None, token_file: str | None, as_json: bool, **options: Any) -> None:
    """Look at this machine, and say what will be slower or is missing, and what to do.

    Ends with status 1 where something is wrong, so that runs would fail.
    """
    looks: list[Callable[[], Iterator[Finding]]] = [of_machine]
    if token_file is not None:
        looks.append(lambda: iter([of_token(token_file)]))
    if address is not None:
        looks.append(lambda: of_cluster(address, token_file, tls_of(options)))
    findings = [finding for look in looks for finding in look()]
    if as_json:
        print(json.dumps([each._asdict() for each in findings], indent=2))
    else:
        _show(findings)
    if any(each.verdict == "wrong" for each in findings):
        sys.exit(1)


COLOURS = {
    "ok": "green",
    "slower": "yellow",
    "missing": "cyan",
    "differs": "yellow",
    "wrong": "bold red",
}


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    wide = max(len(each.what) for each in findings)
    for each in findings:
        line = Text()
        line.append(f"{each.verdict:8}", style=COLOURS[each.verdict])
        line.append(f"{each.what:{wide}}  {each.found}")
        console.print(line, soft_wrap=True)
        if each.advice:
            console.print(Text(f"{'':8}{'':{wide}}  {each.advice}"), soft_wrap=True)
