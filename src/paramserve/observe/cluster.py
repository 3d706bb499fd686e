"""A running cluster as a table, for `paramserve status`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from paramserve.messages import Status
from paramserve.observe.status import by_group, by_rank, drops_by_rank, in_bytes


def as_table(address: str, status: Status) -> RenderableType:
    """Servers, workers, groups and keyed tables of a cluster at one moment."""
    parts = [_servers(status), _workers(status), _groups(status)]
    if any(group.table is not None for beat in status.servers for group in beat.groups):
        parts.append(_tables(status))
    if status.leases:
        parts.append(_leases(status))
    told = f"cluster at {address}: {len(status.servers)} servers, {len(status.members)} workers"
    refused = sum(beat.refused for beat in status.servers)
    if refused:
        told += f"\n{refused} peers were refused before they were known"
    return Group(told, *parts)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")


def _servers(status: Status) -> Table:
    table = _table("servers", "shard", "state", "clients", "values")
    for beat in status.servers:
        state = "silent" if beat.shard in status.silent_servers else "serving"
        table.add_row(str(beat.shard), state, str(beat.clients), in_bytes(beat.value_bytes))
    return table


def _workers(status: Status) -> Table:
    table = _table(
        "workers", "rank", "state", "incarnation", "clocks", "pushes", "staleness", "dropped"
    )
    clocks: dict[int, dict[str, int]] = {}
    for beat in status.servers:
        for group in beat.groups:
            for rank, clock in group.clocks:
                known = clocks.setdefault(rank, {})
                known[group.name] = min(clock, known.get(group.name, clock))
    staleness, dropped = by_rank(status.servers), drops_by_rank(status.servers)
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
            str(dropped.get(member.rank, 0)),
        )
    return table


def _groups(status: Status) -> Table:
    table = _table(
        "groups",
        "group",
        "policy",
        "version",
        "slowest clock",
        "staleness",
        "skipped",
        "dropped",
        "buffered",
        "copies",
    )
    for name, group in sorted(by_group(status.servers).items()):
        policy = f"{group.policy}, then {group.coming}" if group.coming else group.policy
        table.add_row(
            name,
            policy,
            str(group.version),
            str(group.clock),
            f"{group.staleness.mean:.2f} (largest {group.staleness.max})",
            str(group.skipped),
            str(group.dropped),
            str(group.buffered),
            in_bytes(group.kept_bytes),
        )
    return table


def _tables(status: Status) -> Table:
    table = _table("tables", "table", "rows", "memory", "created", "evicted", "unadmitted")
    for name, group in sorted(by_group(status.servers).items()):
        if group.table is not None:
            of = group.table
            counts = (of.created, of.evicted, of.unadmitted)
            told = (f"{of.rows:,}", in_bytes(of.memory_bytes), *(f"{count:,}" for count in counts))
            table.add_row(name, *told)
    return table


def _leases(status: Status) -> Table:
    table = _table("samples by lease", "loader", "rank", "given", "done", "repeated")
    for loader in status.leases:
        for number, (rank, given, done) in enumerate(loader.ranks):
            of_all = (loader.loader, str(loader.repeated)) if number == 0 else ("", "")
            table.add_row(of_all[0], str(rank), str(given), str(done), of_all[1])
    return table
