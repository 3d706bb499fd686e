"""A running cluster as tables, for `paramserve status`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from paramserve.config import is_trained
from paramserve.messages import Status
from paramserve.observe.amounts import in_bytes
from paramserve.observe.checkpoints import checkpoint_status
from paramserve.observe.parts import Part
from paramserve.observe.status import by_group, by_rank, drops_by_rank


def as_table(address: str, status: Status, width: int) -> RenderableType:
    """Servers, workers, groups and keyed tables of a cluster at one moment, for a terminal of this
    many columns. What they have no room for is named."""
    tables = [part.as_table(width) for part in _parts(status)]
    return Group(Text("\n".join(_head(address, status))), *tables)


def as_text(address: str, status: Status) -> str:
    """Status in plain columns, for a file or another program, as wide as what they hold."""
    lines = _head(address, status)
    for part in _parts(status):
        lines += ["", part.title, *part.as_lines()]
    return "\n".join(lines)


def _head(address: str, status: Status) -> list[str]:
    come, expected = len(status.servers), status.expected_servers
    servers = f"{come} of {expected} servers" if come < expected else _count(come, "server")
    lines = [f"cluster at {address}: {servers}, {_count(len(status.members), 'worker')}"]
    refused = sum(beat.refused for beat in status.servers)
    if refused:
        were, they = ("was", "it was") if refused == 1 else ("were", "they were")
        lines.append(f"{_count(refused, 'peer')} {were} refused before {they} known")
    if status.checkpoints is not None:
        lines.append(checkpoint_status(status.checkpoints).line(path=True))
    return lines


def _count(number: int, noun: str) -> str:
    """Count and noun, such as "1 worker" and "2 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _parts(status: Status) -> list[Part]:
    parts = [_servers(status), _workers(status), _groups(status)]
    if any(group.table is not None for beat in status.servers for group in beat.groups):
        parts.append(_tables(status))
    if status.sent:
        parts.append(_sent_gradients(status))
    if status.speeds:
        parts.append(_speeds(status))
    if status.leases:
        parts.append(_leases(status))
    return parts


def _servers(status: Status) -> Part:
    table = Part("servers", "shard", "state", "clients", "values")
    for beat in status.servers:
        state = "silent" if beat.shard in status.silent_servers else "serving"
        table.add_row(str(beat.shard), state, str(beat.clients), in_bytes(beat.value_bytes))
    return table


def _workers(status: Status) -> Part:
    table = Part(
        "workers",
        "rank",
        "state",
        "incarnation",
        "clocks",
        "pushes",
        "staleness",
        "dropped",
        least=("dropped", "incarnation", "pushes", "staleness"),
    )
    clocks: dict[int, dict[str, int]] = {}
    for beat in status.servers:
        for group in beat.groups:
            for rank, clock in group.clocks if is_trained(group.name) else ():
                by_group = clocks.setdefault(rank, {})
                by_group[group.name] = min(clock, by_group.get(group.name, clock))
    staleness, dropped = by_rank(status.servers), drops_by_rank(status.servers)
    for member in status.members:
        own_clocks = clocks.get(member.rank, {})
        pushed = staleness.get(member.rank)
        table.add_row(
            str(member.rank),
            member.state,
            str(member.incarnation),
            ", ".join(f"{name} {clock}" for name, clock in sorted(own_clocks.items())),
            str(pushed.pushes) if pushed is not None else "0",
            f"{pushed.mean:.2f} (largest {pushed.max})" if pushed is not None else "",
            str(dropped.get(member.rank, 0)),
        )
    return table


def _groups(status: Status) -> Part:
    table = Part(
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
        least=("copies", "buffered", "dropped", "skipped", "staleness", "slowest clock"),
    )
    for name, group in sorted(by_group(status.servers).items()):
        if not is_trained(name):
            continue
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


def _tables(status: Status) -> Part:
    counted = ("created", "evicted", "deleted", "unadmitted")
    table = Part("tables", "table", "rows", "memory", *counted, least=counted[::-1])
    for name, group in sorted(by_group(status.servers).items()):
        if group.table is not None:
            of = group.table
            counts = (of.created, of.evicted, of.deleted, of.unadmitted)
            cells = (f"{of.rows:,}", in_bytes(of.memory_bytes), *(f"{count:,}" for count in counts))
            table.add_row(name, *cells)
    return table


def _sent_gradients(status: Status) -> Part:
    columns = ("group", "rank", "gradients", "as sent", "norm left out", "values", "as read")
    least = ("norm left out", "values", "gradients")
    table = Part("encoded", *columns, least=least)
    for name, group in sorted(by_group(status.servers, status.sent).items()):
        for rank, each in group.sent_by_rank.items():
            sizes = in_bytes(each.plain_bytes), in_bytes(each.sent_bytes)
            read = in_bytes(each.read_plain_bytes), in_bytes(each.read_bytes)
            table.add_row(name, str(rank), *sizes, f"{each.residual_norm:.3g}", *read)
    return table


def _speeds(status: Status) -> Part:
    table = Part("own steps", "group", "rank", "a second", "before the last exchange")
    for rank, each in sorted(status.speeds, key=lambda entry: (entry[1].group, entry[0])):
        table.add_row(each.group, str(rank), f"{each.steps_per_s:.3g}", f"{each.steps:,}")
    return table


def _leases(status: Status) -> Part:
    table = Part("samples by lease", "loader", "rank", "given", "done", "repeated")
    for loader in status.leases:
        for number, (rank, leased, done) in enumerate(loader.ranks):
            of_all = (loader.loader, str(loader.repeated)) if number == 0 else ("", "")
            table.add_row(of_all[0], str(rank), str(leased), str(done), of_all[1])
    return table
