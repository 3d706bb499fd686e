"""Shard to shard: how they decide a clock, the members of a group, and a change of policy."""

from __future__ import annotations

from msgspec import Struct

from paramserve.messages.answers import GroupPolicy


class Vote(Struct, frozen=True, array_like=True, tag="vote"):
    """Collect: this shard holds, unapplied, what `contributors` brought for `clock`.

    Contributors are clients, in the order of their ranks: two incarnations of one rank may have
    brought something to different shards.

    `refusal` (kind, failed, fix) is None or says why the clock cannot be applied; `skip`: a
    contributor asked to skip; `finite`: whether the gradients are, and their reduced sum; `weight`:
    the sum of theirs; `members`: number of the `GroupMembership` that it goes by, without which the
    lead does not count it. With clipping, `squared_norm` is that of this shard's part of the sum of
    gradients, before `scale`; both are 0 without.
    """

    group: int
    clock: int
    shard: int
    contributors: tuple[int, ...]
    finite: bool
    skip: bool
    weight: float
    members: int
    clip_norm: float = 0.0
    squared_norm: float = 0.0
    refusal: tuple[str, str, str] | None = None


class Prepare(Struct, frozen=True, array_like=True, tag="prepare"):
    """The shards hold different sets: bring `Vote` for those of these contributors that you hold.

    A shard that still waits for a live worker does not answer.
    """

    group: int
    clock: int
    contributors: tuple[int, ...]


class Commit(Struct, frozen=True, array_like=True, tag="commit"):
    """The lead's one decision about a clock: apply these contributors' gradients times `scale`.

    No contributors: apply nothing; `refusal` says why, or the clock is skipped and counted.
    """

    group: int
    clock: int
    contributors: tuple[int, ...]
    scale: float
    refusal: tuple[str, str, str] | None = None


class GroupMembership(Struct, frozen=True, array_like=True, tag="membership"):
    """The lead's decision about who is a member of the group, from `clock` on.

    `number` counts its decisions; the newest one holds, whole. `members`: (rank, client that has
    joined or 0, number of its request, the clock that the rank has begun with). Those that are not
    live are not waited for.
    """

    group: int
    number: int
    clock: int
    members: tuple[tuple[int, int, int, int], ...]


class MembershipKnown(Struct, frozen=True, array_like=True, tag="membership-known"):
    """This shard goes by the lead's decision of this number."""

    group: int
    number: int
    shard: int


class Pause(Struct, frozen=True, array_like=True, tag="pause"):
    """The lead prepares a change of policy: hold the steps that no worker has reached yet, and say
    which is the first of them."""

    group: int
    number: int


class Paused(Struct, frozen=True, array_like=True, tag="paused"):
    """This shard holds steps from `clock` on until the change is decided. `window`: requests that a
    client may have on the way."""

    group: int
    number: int
    shard: int
    clock: int
    window: int


class Switch(Struct, frozen=True, array_like=True, tag="switch"):
    """The lead has decided a change of policy, the same for all shards."""

    change: GroupPolicy


PeerMessage = Vote | Prepare | Commit | GroupMembership | MembershipKnown | Pause | Paused | Switch
