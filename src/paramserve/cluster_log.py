"""What the coordinator logs of its cluster: members that come and go, refusals, checkpoints,
policies, to the logger "paramserve"."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from paramserve.core.cut import CUT_LIMIT_MAX_S
from paramserve.core.membership import DEAD, EXPECTED, LEFT, LIVE, RESTARTING, RETIRING, ServerEntry
from paramserve.logs import event
from paramserve.messages import CheckpointReport, Failed, Member, Members, ServerBeat

logger = logging.getLogger("paramserve")

STATES = {
    EXPECTED: ("worker-expected", "is expected"),
    LIVE: ("worker-joined", "has come"),
    LEFT: ("worker-left", "has left"),
    DEAD: ("worker-died", "counts as dead"),
    RESTARTING: ("worker-restarting", "counts as dead, and may come again"),
    RETIRING: ("worker-retiring", "is asked to end"),
}
"""The event of a worker that comes into a state, and how it is told."""
WAITED_FOR = {
    EXPECTED: "never came",
    LIVE: "still there",
    RETIRING: "asked to end",
    RESTARTING: "may come again",
}


class ClusterLog:
    """Logs one line for each thing that changes.

    Args:
        servers, workers: of the cluster.
        warns: whether deaths, losses and refusals are warnings; False: a driver tells of them, and
            here they are at level INFO.
    """

    def __init__(self, servers: int, workers: int, *, warns: bool) -> None:
        self._bad = logging.WARNING if warns else logging.INFO
        self._expected = servers
        self._complete = False
        self._servers: dict[int, bool] = {}
        """Whether the server of a shard that registered is lost."""
        self._members = {rank: Member(rank, 0, 0, EXPECTED) for rank in range(workers)}
        self._policies: dict[str, int] = {}
        """How often the policy of each group has changed."""
        self._failures = 0
        """Checkpoints that have failed so far."""

    def on_members(self, members: Members) -> None:
        """The membership has changed, or the servers are complete."""
        if members.servers and not self._complete:
            self._complete = True
            servers = f"all {self._expected} servers are" if self._expected > 1 else "the server is"
            extra = event("servers-complete", role="coordinator", servers=self._expected)
            logger.info("%s there: workers may come", servers, extra=extra)
        before, self._members = self._members, {each.rank: each for each in members.members}
        for rank, member in sorted(self._members.items()):
            old = before.get(rank)
            same = old is not None and old.incarnation == member.incarnation
            if same and old is not None and old.state == member.state:
                continue
            self._tell(old, member)

    def _tell(self, old: Member | None, member: Member) -> None:
        again = f" (incarnation {member.incarnation})" * (member.incarnation > 1)
        name, text = STATES.get(member.state, ("log", member.state))
        if old is not None and old.state == DEAD and member.state == LIVE:
            text += " after it had died: it goes on where the others are, not where it was"
            again += "; restart_s (--restart) would keep its place for a while"
        bad = member.state in (DEAD, RESTARTING)
        extra = event(
            name,
            role="coordinator",
            rank=member.rank,
            client=member.client,
            incarnation=member.incarnation,
        )
        level = self._bad if bad else logging.INFO
        logger.log(level, "rank %d %s%s", member.rank, text, again, extra=extra)

    def on_servers(self, servers: Mapping[int, ServerEntry]) -> None:
        """Servers have registered, or are lost."""
        for shard, each in sorted(servers.items()):
            if self._servers.get(shard) == each.lost:
                continue
            self._servers[shard] = each.lost
            address = each.addresses[-1].removeprefix("tcp:")
            name = "server-lost" if each.lost else "server-joined"
            extra = event(name, role="coordinator", server=shard, address=address)
            if each.lost:
                text = "the server of shard %d at %s is lost"
                logger.log(self._bad, text, shard, address, extra=extra)
            elif self._expected > 1:
                text = "the server of shard %d at %s has registered"
                logger.info(text, shard, address, extra=extra)

    def on_refused(self, answer: Failed) -> None:
        """Something that was asked for is refused."""
        extra = event("request-refused", role="coordinator", error=answer.kind)
        logger.log(self._bad, "refused: %s", answer.failed, extra=extra)

    def on_beat(self, beat: ServerBeat) -> None:
        """A server tells how its groups stand: its policies may have changed."""
        for group in beat.groups:
            change = group.change
            if change is None or change.number <= self._policies.get(group.name, 0):
                continue
            self._policies[group.name] = change.number
            name, clock = change.policy.name, change.clock
            extra = event(
                "policy-changed", role="coordinator", group=group.name, policy=name, clock=clock
            )
            text = "group %r goes on under %s from clock %d"
            logger.info(text, group.name, name, clock, extra=extra)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """A checkpoint is over."""
        if report.failed > self._failures:
            self._failures = report.failed
            extra = event("checkpoint-failed", role="coordinator", failed=report.failed)
            logger.warning("%s. Training goes on", report.why, extra=extra)
            return
        extra = event(
            "checkpoint-written",
            role="coordinator",
            checkpoint=report.name,
            bytes=report.nbytes,
            seconds=report.seconds,
            pause_s=report.pause_s,
        )
        logger.info(
            "checkpoint %s: %.1f MB in %.1f s, longest pause %.1f ms",
            report.name,
            report.nbytes / 1e6,
            report.seconds,
            report.pause_s * 1e3,
            extra=extra,
        )
        if report.left_out:
            names = report.left_out
            fields = event(
                "checkpoint-left-out", role="coordinator", checkpoint=report.name, left_out=names
            )
            logger.warning(
                "checkpoint %s has the last push of %s on some servers only: all have waited "
                "%.0f s for the rest of it",
                report.name,
                names,
                CUT_LIMIT_MAX_S,
                extra=fields,
            )

    def tell_paused(self, paused_s: float, stall_s: float) -> None:
        """Log that the coordinator did not run for so long."""
        level = logging.WARNING if paused_s > stall_s else logging.DEBUG
        extra = event("paused", role="coordinator", seconds=round(paused_s, 3))
        text = "the coordinator did not run for %.1f s: not counted"
        logger.log(level, text, paused_s, extra=extra)

    def tell_missing_servers(self, shards: list[int]) -> None:
        """Log the shards whose server has not registered yet, if there are some."""
        if shards:
            come = self._expected - len(shards)
            logger.warning(
                "%d of %d servers have registered: workers wait for those of shards %s",
                come,
                self._expected,
                shards,
                extra=event("servers-missing", role="coordinator", shards=shards),
            )

    def ranks_in(self, state: str) -> list[int]:
        """The ranks of this state."""
        return sorted(rank for rank, each in self._members.items() if each.state == state)

    def missing(self) -> str:
        """The workers that have not come or left yet, as "never came: 1, 2; still there: 0"."""
        states: dict[str, list[str]] = {}
        for rank, member in sorted(self._members.items()):
            states.setdefault(member.state, []).append(str(rank))
        return "; ".join(
            f"{WAITED_FOR[state]}: {', '.join(ranks)}"
            for state, ranks in states.items()
            if state in WAITED_FOR
        )

    def tell_missing(self) -> None:
        """Log these workers."""
        extra = event("workers-missing", role="coordinator", ranks=self._waited_for())
        logger.info("not done yet. %s", self.missing(), extra=extra)

    def _waited_for(self) -> list[int]:
        return sorted(rank for rank, each in self._members.items() if each.state in WAITED_FOR)
