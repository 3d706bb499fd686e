"""What a client knows of its groups' policies: which terms hold for which of its steps."""

from __future__ import annotations

from paramserve.config import ConsistencySpec
from paramserve.consistency.registry import PolicyTraits, terms
from paramserve.core.policy_epochs import CHANGES_MAX
from paramserve.messages import GroupPolicy


class GroupTraits:
    """Terms by group and clock: the cluster's, the group's own, and what they were changed to.

    Args:
        cluster: the policy of groups that were defined without one of their own.
    """

    def __init__(self, cluster: ConsistencySpec) -> None:
        self.cluster = terms(cluster)
        self.lasting: dict[int, PolicyTraits] = {}
        """Traits for all clocks, by group that is defined and whose policy was not changed."""
        self._own: dict[int, PolicyTraits] = {}
        self._changes: dict[int, tuple[tuple[int, int, PolicyTraits], ...]] = {}
        """Changes by group: (number, first clock, terms), newest first; never altered in place."""

    def defined(self, group: int, described: ConsistencySpec | None) -> None:
        """A block of this group was found, which was defined with this policy."""
        if described is not None and group not in self._own:
            self._own[group] = terms(described)
        self.lasting[group] = self._own.get(group, self.cluster)
        if group in self._changes:  # asked last: another thread may hear of a change meanwhile
            self.lasting.pop(group, None)

    def undefined(self, group: int) -> None:
        """The only block of this group that was known was refused: the next one decides."""
        self._own.pop(group, None)
        self.lasting.pop(group, None)

    def changed(self, news: GroupPolicy) -> None:
        """A shard told of a change; what is known already changes nothing."""
        changes = self._changes.get(news.group, ())
        if any(number == news.number for number, _, _ in changes):
            return
        new = (news.number, news.clock, terms(news.policy))
        newest_first = sorted((*changes, new), key=lambda each: each[0], reverse=True)
        self._changes[news.group] = tuple(newest_first[:CHANGES_MAX])
        self.lasting.pop(news.group, None)

    def at(self, group: int, clock: int) -> PolicyTraits:
        """The terms of a step of a group that begins at `clock`."""
        for _, first, changed in self._changes.get(group, ()):
            if clock >= first:
                return changed
        return self._own.get(group, self.cluster)
