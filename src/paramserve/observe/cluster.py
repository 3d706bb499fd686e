"""A running cluster as a table, for `paramserve status`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from paramserve.messages import Status
from paramserve.observe.status import by_group, by_rank

UNITS = ("B", "KB", "MB", "GB", "TB")


def as_table(address: str, status: Status) -> RenderableType:
    """Servers, workers and groups of a cluster at one moment."""
    return Group(
        f"cluster at {address}: {len(status.servers)} servers, {len(status.members)} workers",
        _servers(status),
        _workers(status),
        _groups(status),
    )


def _servers(status: Status) -> Table:
    table = Table("shard", "state", "clients", "values", title="servers", title_justify="left")
    for beat in status.servers:
        state = "silent" if beat.shard in status.silent_servers else "serving"
        table.add_row(str(beat.shard), state, str(beat.clients), in_bytes(beat.value_bytes))
    return table


def _workers(status: Status) -> Table:
    table = Table(
        "rank",
        "state",
        "incarnation",
        "clocks",
        "pushes",
        "staleness",
        title="workers",
        title_justify="left",
    )
    clocks: dict[int, dict[str, int]] = {}
    for beat in status.servers:
        for group in beat.groups:
            for rank, clock in group.clocks:
                known = clocks.setdefault(rank, {})
                known[group.name] = min(clock, known.get(group.name, clock))
    staleness = by_rank(status.servers)
    for member in status.members:
        told = clocks.get(member.rank, {})
        pushed = staleness.get(member.rank)
        table.add_row(
            str(member.rank),
            member.state,
            str(member.incarnation),
            ", ".join(f"{name} {clock}" for name, clock in sorted(told.items())),
            str(pushed.pushes) if pushed is not None else "0",
            f"{pushed.mean:.2f} (largest {pushed.max})" if pushed is not None else "",
        )
    return table


def _groups(status: Status) -> Table:
    table = Table(
        "group", "version", "slowest clock", "skipped", title="groups", title_justify="left"
    )
    for name, group in sorted(by_group(status.servers).items()):
        table.add_row(name, str(group.version), str(group.clock), str(group.skipped))
    return table


def in_bytes(count: int) -> str:
    """Bytes for people, by thousands."""
    size = float(count)
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {UNITS[-1]}"
