"""Shard to shard: how they decide a clock, a group's members, a change of policy, and a cut."""

from __future__ import annotations

from msgspec import Struct

from paramserve.messages.answers import GroupPolicy


class Vote(Struct, frozen=True, array_like=True, tag="vote"):
    """Collect: this shard holds, unapplied, what `contributors` pushed for `clock`.

    Contributors are clients, in the order of their ranks: two incarnations of one rank may have
    pushed to different shards.

    `refusal` (kind, failed, fix) is None or says why the clock cannot be applied; `skip`: a
    contributor asked to skip; `finite`: whether the gradients are, and their reduced sum; `weight`:
    the sum of theirs; `known`: the last entry of the decision log that this shard has applied,
    without the newest members of which the lead does not count the vote. With clipping,
    `squared_norm` is that of this shard's part of the sum of gradients, before `scale`; both are 0
    without. `others`: where the policy leaves some out for NaN or Inf, the client and the weight of
    each that is not left out here, of which alone all that is said; empty: none is left out.
    """

    group: int
    clock: int
    shard: int
    contributors: tuple[int, ...]
    finite: bool
    skip: bool
    weight: float
    known: int
    clip_norm: float = 0.0
    squared_norm: float = 0.0
    refusal: tuple[str, str, str] | None = None
    others: tuple[tuple[int, float], ...] = ()


class Prepare(Struct, frozen=True, array_like=True, tag="prepare"):
    """The shards hold different sets: send `Vote` for those of these contributors that you hold.

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
    """The lead's decision about who is a member of the group, from its undecided clock on; the
    newest one holds, whole.

    `members`: (rank, client that has joined or 0, number of its request, the clock that the rank
    has begun with). Those that are not live are not waited for.
    """

    group: int
    members: tuple[tuple[int, int, int, int], ...]


class Switch(Struct, frozen=True, array_like=True, tag="switch"):
    """The lead's decision about a change of policy, the same for all shards."""

    change: GroupPolicy


class Pause(Struct, frozen=True, array_like=True, tag="pause"):
    """The lead prepares the change of policy of this number: hold the steps that no worker has
    reached yet, and say which is the first of them (`Paused`)."""

    group: int
    number: int


Decision = Commit | GroupMembership | Pause | Switch


class LogEntry(Struct, frozen=True, array_like=True, tag="log-entry"):
    """An entry of the decision log, from the lead: every shard applies them in this order."""

    number: int
    decision: Decision


class Acknowledge(Struct, frozen=True, array_like=True, tag="acknowledge"):
    """This shard has applied the decisions up to this number."""

    shard: int
    number: int


class Paused(Struct, frozen=True, array_like=True, tag="paused"):
    """This shard holds steps from `clock` on until the change is decided. `window`: requests that a
    client may have on the way."""

    group: int
    number: int
    shard: int
    clock: int
    window: int


class CutAsk(Struct, frozen=True, array_like=True, tag="cut-ask"):
    """Shard 0 begins a cut: stop changing anything, and say how far each client has come.

    `number` counts the cuts. `owner`: the client that reads it, or 0. `groups`: those whose values
    it has, empty for all; `whole`: with rule states and all else that a shard is rebuilt from.
    `snapshot`: it is for watchers of the group. `checkpoint`: the number of the one that it is for,
    or 0; `full`: which is to have all rows of tables. `limit_s`: stop for at most so long.
    """

    number: int
    owner: int
    groups: tuple[int, ...]
    whole: bool
    snapshot: bool = False
    checkpoint: int = 0
    full: bool = False
    limit_s: float = 0.0


class CutAt(Struct, frozen=True, array_like=True, tag="cut-at"):
    """This shard has stopped for a cut.

    `clients`: (client, number of its last request that has had its effect, whether it is known to
    send no more to any shard). `groups`: (group, first clock that is not committed). `busy`: a
    change of policy is under way, and the shard has not stopped. `closed`: those of `clients` whose
    sessions have ended here.
    """

    number: int
    shard: int
    clients: tuple[tuple[int, int, bool], ...]
    groups: tuple[tuple[int, int], ...]
    busy: bool = False
    closed: tuple[int, ...] = ()


class CutTo(Struct, frozen=True, array_like=True, tag="cut-to"):
    """Where the cut is: the highest of all shards. Execute exactly what is up to there."""

    number: int
    clients: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, int], ...]


class CutDone(Struct, frozen=True, array_like=True, tag="cut-done"):
    """This shard has its part of a cut, and goes on. `clients`: (client, number) in it. `blocks`:
    the numbers of all blocks, of a whole cut; `whole`: of tables of which it has all rows."""

    number: int
    shard: int
    clients: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()


class CutOver(Struct, frozen=True, array_like=True, tag="cut-over"):
    """A cut is complete, or was given up: then each shard releases its part. `torn`: clients that
    ended, or stood still, while they were sending, so that the shards have them up to different
    numbers. `version`: of a snapshot, the group's on shard 0. `over`: clients whose sessions have
    ended on every shard: they are remembered no longer. `checkpoint`: that the cut is for, or 0:
    those of `over` that are torn are remembered until it is committed."""

    number: int
    complete: bool
    torn: tuple[int, ...] = ()
    version: int = 0
    over: tuple[int, ...] = ()
    checkpoint: int = 0


CutMessage = CutAsk | CutAt | CutTo | CutDone | CutOver
PeerMessage = Vote | Prepare | LogEntry | Acknowledge | Paused | CutMessage
