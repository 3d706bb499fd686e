"""The client that users hold: its calls, and the parts that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy.typing as npt

from paramserve.client import arrow
from paramserve.client.connection import Connection
from paramserve.client.dense import Dense
from paramserve.client.directory import Directory
from paramserve.client.groups import Groups
from paramserve.client.keyed import Keyed
from paramserve.client.labels import are_labels, check_not_labels, labels_at_most
from paramserve.client.row_reads import RowRead, TableRead
from paramserve.client.rows import TablePush
from paramserve.client.saving import Saving
from paramserve.client.steps import Steps
from paramserve.client.table import Table
from paramserve.client.ticket import Ticket
from paramserve.client.waits import Waits
from paramserve.codecs.base import Codec
from paramserve.compiling import load_routing
from paramserve.consistency.base import Policy
from paramserve.core.partition import Block
from paramserve.core.policy_traits import GroupTraits
from paramserve.core.table.options import LRU, TTL, Evict, Init, MinCount, Normal, TableOptions
from paramserve.errors import ClientClosed, ParamServeError
from paramserve.messages import Link
from paramserve.rules.base import Rule

Array = npt.NDArray[Any]


class Client:
    """A connection to all servers; make one with `Cluster.client()` or get `worker.client`.

    Usable from any thread. Not across a fork: a child makes its own. A pickled client becomes a new
    one, with a new id, where it is unpickled.

    A call that is interrupted (Ctrl-C, a signal handler that raises) was sent whole or not at all.
    The client stays usable, or closes itself where the interrupt came while it changed what it
    knows of its session: then the next call raises `ClientClosed`, which says so.

    Attributes:
        connection: who this client is in its cluster, and how it reaches it.
        steps: how far it is in each group, and by whose terms it steps.
        directory: what is defined, as it knows it.
        dense: pushes and reads by block, as `paramserve.pytorch` makes them.
        reads: of tables' rows.
        saving: what its worker saves for the next incarnation.
        load_tables: files of the rows that tables begin with, by name; the client that defines such
            a table loads it, before any other one finds it.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        deadlines = connection.deadlines
        exchange, rank = connection.exchange, connection.rank
        waits = Waits(
            exchange,
            rank,
            deadlines.request_s,
            busy_s=deadlines.busy_s,
            stall_s=deadlines.stall_s,
            all_live=connection.all_live,
            open_collective=connection.open_collective,
            pass_by=connection.pass_by,
        )
        self.steps = Steps(exchange, rank, waits, GroupTraits(connection.consistency))
        self.steps.first = connection.rank < connection.first
        connection.tell_sent(self.steps.sent_gradients)
        connection.tell_usage(self.steps.usage.report)
        self.steps.resume(connection.resume_reports, excluded=connection.excluded)
        self.directory = Directory(connection, self.steps)
        self._keyed = Keyed(connection, self.steps, self)
        self.dense = Dense(connection, self.steps, self.directory, self._keyed)
        self.reads = self._keyed.reads
        self.load_tables: Mapping[str, str] = {}
        self._tables: dict[str, Table] = {}
        self.saving = Saving(connection, self.steps.resumed, self.steps.register)
        self._groups = Groups(connection, self.steps, self.directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.connection,)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(id={self.connection.id}, rank={self.rank}, "
            f"at={self.connection.control.address!r})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """Rank of the worker; -1 for a client that no barrier waits for."""
        return self.connection.rank

    @property
    def closed(self) -> bool:
        """Whether it was closed, by a call or because the cluster was lost."""
        error = self.connection.exchange.failure
        return self.connection.closed or isinstance(error, ClientClosed)

    @property
    def timeout_s(self) -> float:
        """Deadline of every call that names none, in seconds; may be changed. Until then, live
        workers that do not step are waited for longer, `Deadlines.busy_s`."""
        return self.steps.waits.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.connection.timeout_s = self.steps.waits.timeout_s = value
        self.steps.waits.busy_s = 0.0  # the caller's limit is one for all

    # --- parameters by name ----------------------------------------------------------------------

    def define(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None = None,
        *,
        rule: Rule | Callable[..., Any] | None = None,
        group: str = "default",
        consistency: Policy | None = None,
        nth: int = -1,
        aliases: Mapping[str, str] | None = None,
        links: Sequence[Link] = (),
        dtypes: Mapping[str, str] | None = None,
        push: Codec | None = None,
        pull: Codec | None = None,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> Block:
        """Create parameters on the servers. Of several who define the same, the first one's values
        stand; the others are checked and write nothing.

        Args:
            name: of one tensor, or a mapping from names to values that are kept together.
            value: of one tensor; float32, float64, float16 or bfloat16 (a tensor of torch's, or an
                array of ml_dtypes'), without a rule int64 as well.
            rule: how a gradient changes the values; None: they can only be assigned. A class of
                torch.optim, or `functools.partial(torch.optim.Adam, lr=0.01)`, stands for its rule.
            group: what it steps together with. No name of one ends with " (labels)".
            consistency: of the whole group, given with its first define; None: the group's, or the
                cluster's if it has none of its own.
            nth: which one it is of the blocks that all ranks define in this group, each by itself;
                -1: not said. Then ranks with other names for it do not wait for each other.
            aliases: further names of tied tensors, each with the one in `name`, for clients
                that read a whole state from the servers.
            links: tensors that models of several groups have, for the same readers.
            dtypes: by name, in which the same readers give values that have no rule and are
                narrower in the model: "bool", "uint8", "int8", "int16" or "int32" of int64,
                "float16" or "bfloat16" of float32.
            push: how gradients are encoded on their way to servers on other hosts, as in
                `push=ps.Int8()`; float32 only. None: they are not.
            pull: the same for values that are pulled, as in `pull=ps.BFloat16()`, or for what has
                changed of them, as in `pull=ps.Delta(ps.Int4())`: they come rounded. What is read
                otherwise (`snapshots`, results, checkpoints) does not.
            dtype: "bfloat16" or "float16": in which gradients and pulled values lie in clients'
                memory and travel; None: that of the values. The servers keep float32, which may
                be given here. numpy has no bfloat16: `pull` and `gradient` give its bits as uint16.
        Returns:
            The block that holds the tensors.
        Raises:
            DefineMismatch: defined in this group before with another shape, dtype or rule, or the
                group has another policy. In another group the same name is another parameter.
            CodecMismatch: defined before with other codecs.
            UnknownRule: the servers were not started with the rule or the policy. The name stays
                free.
            NonFinite, ValueError, TypeError: the values. In all cases nothing was applied.
        """
        return self.directory.define(
            name,
            value,
            rule=rule,
            group=group,
            consistency=consistency,
            nth=nth,
            aliases=aliases,
            links=links,
            dtypes=dtypes,
            push=push,
            pull=pull,
            dtype=dtype,
            timeout_s=timeout_s,
        )

    def blocks(self) -> list[Block]:
        """Every block of tensors that is defined now, of all groups."""
        self.connection.check()
        with self.connection.lock:
            return self.directory.find(None)

    def push(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        gradient: npt.ArrayLike | None = None,
        *,
        weight: float | None = None,
    ) -> Ticket:
        """Send gradients; the servers apply the rule. Returns when their bytes are captured.

        Under a policy that collects (Sync) they are put together until `tick()`; two pushes to one
        name add up there.

        Args:
            name: of one parameter, or a mapping from names to gradients of one group.
            gradient: shape [*value shape], floating point.
            weight: number of samples behind it, above 0; 1 if None. Under a policy that collects
                it is that of the whole step.
        Returns:
            Ticket of the outcome.
        Raises:
            UnknownName, ShapeMismatch, DtypeMismatch, NonFinite: nothing was applied.
            NotAMember: under Sync, this client has no rank. Nothing was applied or kept.
            ValueError: the weight, or another one was given in this step. Nothing was applied.
        """
        return self.dense.push(name, gradient, weight)

    def push_pull(
        self,
        gradients: Mapping[str, npt.ArrayLike],
        *,
        tick: bool = False,
        weight: float | None = None,
        copy: bool = True,
        timeout_s: float | None = None,
    ) -> dict[str, Array]:
        """Push, and read the same names' values after it, in one message.

        Args:
            tick: end the step as well. Under Sync, a push without it is not yet in the values.
            weight: as for `push`.
            copy: as for `pull`.
        Returns:
            By name, the values.
        Raises:
            As `push` and `pull`.
        """
        return self.dense.push_pull(gradients, tick, weight, copy, timeout_s)

    def pull(
        self,
        names: str | Sequence[str] | None = None,
        *,
        out: Any = None,
        copy: bool = True,
        timeout_s: float | None = None,
    ) -> Any:
        """Read values.

        Args:
            names: one name, several, or None for all.
            out: an array (or a mapping by name) of the right shape and dtype to read into.
            copy: False gives read-only views that are valid until the next pull of these names.
        Returns:
            An array for one name, else a dict by name; yours to keep.
        Raises:
            UnknownName, ShapeMismatch: nothing was read.
            PullTimeout: not there in `timeout_s`; the text says who is missing.
        """
        return self.dense.pull(names, out, copy, timeout_s)

    def gradient(self, name: str) -> Array:
        """An array in shared memory for the gradient of `name`: fill it, push it, no copy.

        Shape and dtype are the parameter's; what it holds at first is undefined. It is yours until
        it is pushed.
        """
        return self.dense.gradient(name)

    def assign(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Overwrite values; returns when they are in place on all shards.

        Raises:
            UnknownName, ShapeMismatch, DtypeMismatch: nothing was applied.
        """
        self.dense.assign(name, value, timeout_s)

    # --- tables ----------------------------------------------------------------------------------

    def table(
        self,
        name: str,
        dim: int | None = None,
        *,
        rule: Rule | Callable[..., Any] | None = None,
        init: Init | None = None,
        dtype: str = "float32",
        admit: MinCount | None = None,
        evict: TTL | LRU | Evict | None = None,
        max_bytes: int = 0,
        seed: int = 0,
        consistency: Policy | None = None,
        labels: bool | int = False,
        push: Codec | None = None,
        pull: Codec | None = None,
        timeout_s: float | None = None,
    ) -> Table:
        """A keyed table: made by the first who asks for it with a `dim` and a rule, found by all
        others. Of several who define the same one, all get the same one.

        Args:
            name: of the table, and of the group that steps with it. No name ends with " (labels)".
            dim: values of a row, 1 to 65536. Without it the table has to be there.
            rule: how a gradient changes a row: a rule; or a class of torch.optim that works on each
                element alone, as it is or as `functools.partial(torch.optim.Adam, lr=0.01)`.
            init: what rows begin with, drawn from (seed, name, key) only: `ps.Uniform`,
                `ps.Normal` (the default, std 0.01), `ps.Constant` or `ps.Zeros`.
            dtype: in which the servers keep values: float32, bfloat16 or float16, the last two
                rounded stochastically. Gradients, pulled rows and the rule's state are float32.
                To count exactly: int64 or float64, with `rule=ps.Add()` and `init=ps.Zeros()`;
                then what is pushed and pulled is of this dtype, and no codec encodes it. float32
                counts up to 2**24. A table of int64 follows a policy that sums whole gradients
                (`ps.Async()`, `ps.Sync(reduce="sum")`), and is `ps.Async()` under a mean.
            admit: `ps.MinCount(n)`: a key gets a row at its n-th push; None: at its first.
            evict: `ps.TTL(clocks=...)`, `ps.LRU(rows=...)` or both, joined by `|`; None: rows stay.
            max_bytes: of the table on one server; 0: what there is. Past it the least recently used
                row goes, if `evict` has an `LRU`; else a push of new keys is refused (`TableFull`).
            seed: of the initial values and of the rounding.
            consistency: the table's own policy; None: the run's or cluster's, or `ps.Async()` where
                that one is not for tables. Not `ps.DelayCompensated`, `ps.LocalSteps` or
                `ps.ElasticAverage`.
            labels: keep the strings of keys that are given as strings, for `Table.labels`: how many
                at most, then the least recently sent go; True: as many as the `LRU` has rows, or 10
                million. They are a table of their own, `<name> (labels)`, of 192 bytes a string
                with its index, which `max_bytes` bounds once more.
            push: how gradients are encoded on their way to servers on other hosts, each row by
                itself, as in `push=ps.Int8()`: `ps.BFloat16`, `ps.Float16`, `ps.Int8`, `ps.Int4`,
                `ps.Int2` or `ps.Sign`. `ps.Int8`, `ps.Int4` and `ps.Int2` round at random, so that
                the mean is right, and no residual is kept: `rounding` and `feedback` of the codec
                say nothing here.
            pull: the same for rows that are pulled, as in `pull=ps.BFloat16()`: they come rounded
                to the nearest. What is read otherwise (`scan`, files, checkpoints) does not, nor
                what `job.table` reads. With either codec, keys travel as their distances.
        Returns:
            The table; the same object for the same name.
        Raises:
            DefineMismatch: defined before with other options, or the name is a group of tensors'.
            CodecMismatch: defined before with other codecs.
            ParamServeError: a codec that is not for rows.
            UnknownName: there is no such table, and no `dim` was given.
            UnknownRule: the servers were not started with the rule or the policy.
            ValueError, TypeError: an option. In all cases nothing was applied.
        """
        self.connection.check()
        if not isinstance(name, str) or not name:
            raise TypeError(f"a table's name is a str that is not empty, got {name!r}")
        if dim is None:
            existing = self._tables.get(name)
            return (
                existing if existing is not None else self._table(self.directory.find_table(name))
            )
        options = TableOptions(init if init is not None else Normal(), admit, evict, max_bytes)
        check_not_labels(name)
        most = labels_at_most(labels, options)
        block = self.directory.define_table(
            name,
            dim,
            rule=rule,
            dtype=dtype,
            options=options,
            seed=seed,
            consistency=consistency,
            labels=most,
            push=push,
            pull=pull,
            timeout_s=timeout_s,
            fill=self._fill if most or name in self.load_tables else None,
        )
        return self._table(block)

    def _table(self, block: Block) -> Table:
        """The table that a block is: the same object for the same name."""
        load_routing()
        return self._tables.setdefault(block.group_name, Table(self, self._keyed, block))

    def _fill(self, block: Block) -> None:
        """What a new table needs before another client finds it: labels first, since rows of a
        file may come with some."""
        assert block.table is not None
        if block.table.labels:
            self._keyed.define_labels(block)
        if block.group_name in self.load_tables:
            arrow.fill(Table(self, self._keyed, block), self.load_tables[block.group_name])

    def tables(self) -> list[Table]:
        """All tables of the cluster, in the order in which they were defined; the labels of one are
        no table by themselves."""
        self.connection.check()
        tables = [self._table(block) for block in self.directory.tables()]
        return [table for table in tables if not are_labels(table.name)]

    def push_tables(
        self,
        pushes: Sequence[TablePush],
        *,
        tick: bool = True,
        weight: float | None = None,
        skip: bool = False,
        leased: bool = False,
        numbered: Callable[[Ticket], object] | None = None,
    ) -> Ticket:
        """Push to several tables in one message to each shard; nothing, or all of it, is sent.

        Without a tick, gradients of tables whose policy collects (Sync) are kept until theirs.

        Args:
            pushes: at most one for each table; with no keys in it only the clock goes on.
            tick: end this client's step on each of the tables.
            weight: number of samples behind the gradients, above 0; 1 if None. Under a policy that
                collects it is that of the whole step.
            skip: there are no usable gradients in this step.
            leased: samples that were leased to this worker are in this step, and in no step of
                dense layers on the servers.
            numbered: with a tick: called with the ticket as soon as the call is certain to be sent,
                before anything of it is. An interrupt within it closes the client.
        Returns:
            Ticket of the last table; its result is there when those of all are, and raises what
            any of them was refused with.
        Raises:
            As `Table.push`.
        """
        return self._keyed.push(
            pushes, tick=tick, weight=weight, skip=skip, leased=leased, numbered=numbered
        )

    def prefetch_tables(self, reads: Iterable[TableRead | tuple[Any, ...]]) -> list[RowRead]:
        """Ask for rows of several tables ahead, in one message to each shard.

        Args:
            reads: tables and keys, as `Table.prefetch` takes them; the same table may come more
                than once.
        Returns:
            The reads; `drop()` of one that no pull has read gives its memory back.
        Raises:
            As `Table.prefetch`. None of them is read ahead.
        """
        return self._keyed.prefetch(reads)

    # --- steps and groups ------------------------------------------------------------------------

    def tick(self, group: str = "default", *, weight: float | None = None) -> Ticket:
        """End this client's step on a group: its clock grows by one.

        Under Sync, what was pushed since the last tick is this worker's part of the clock; the
        ticket's outcome is there when all live workers have ended it.

        Args:
            weight: under Sync, number of samples behind the step, above 0; what its pushes said,
                or 1, if None.
        Raises:
            UnknownName, NonFinite: nothing was applied.
            ValueError: the weight, or a push of this step had another one. Nothing was applied.
        """
        return self.dense.tick(group, weight)

    def clock(self, group: str = "default") -> int:
        """Steps that this client has ended on a group, with those of older incarnations of its
        rank."""
        self.steps.clock_read = True
        return self.steps.clocks.get(group, 0)

    def set_consistency(self, name: str, policy: Policy, *, timeout_s: float | None = None) -> int:
        """Give a group another policy while it is trained.

        Returns when all shards have agreed from which clock on it holds. Steps of earlier clocks
        go by the old policy on all shards, later ones by the new one. No worker has to stop for it.

        Args:
            name: of the group.
            policy: built in, or of a class that the servers were started with. Not
                `ps.LocalSteps` or `ps.ElasticAverage`.
        Returns:
            The first clock of the new policy.
        Raises:
            UnknownName: nothing is defined in the group. UnknownRule: a server, which is named,
                does not know the policy. TypeError: it is no policy. ValueError: it cannot work
                with this many workers, or the change needs another optimizer in the workers. In
                all these cases nothing was changed on any server, and training goes on.
            ParamServeError: not all workers are past the clock of an earlier change. Nothing was
                changed.
            Timeout: not all shards have decided in `timeout_s`; the text names them. The change
                may still come.
        """
        return self._groups.set_consistency(name, policy, timeout_s)

    def rest(self, group: str = "default", *, timeout_s: float | None = None) -> None:
        """Take no part in a group until the next step there: no rank waits for this one.

        A pull is no step, and ends no rest: it reads what is there, whatever bound others have.
        What was sent is answered first. The next step may go on at a later clock, as that of a
        worker that joins.

        Raises:
            UnknownName: nothing is defined in the group. Nothing was sent.
            PushTimeout: something is unanswered after `timeout_s`.
        """
        self._groups.rest(group, timeout_s)

    def enter(self, group: str = "default", *, timeout_s: float | None = None) -> bool:
        """Take part in a group from now on, if this worker joined late or rests.

        The next step does the same by itself. To enter before the gradient is computed, and to pull
        then, is better under a policy that collects: that gradient comes from present values. Of
        several groups that collect, the first one is entered now, and the others follow with this
        worker's first step there.

        Returns:
            Whether it took no part before: then the values may have changed since the last pull.
        Raises:
            UnknownName: nothing is defined in the group.
            PushTimeout: not all shards have answered after `timeout_s`.
        """
        return self._groups.enter(group, timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent has been answered, and raise what was refused unread.

        Raises:
            PushTimeout: something is unanswered after `timeout_s`.
        """
        self.connection.check()
        limit = self.connection.limit(timeout_s)
        if not self.connection.lock.acquire(timeout=limit):  # Another thread's call is under way.
            raise self.steps.waits.timed_out("drain", None, limit)
        try:
            self.steps.drain(timeout_s)
        finally:
            self.connection.lock.release()

    def close(self, reason: ParamServeError | None = None, *, leave: bool = True) -> None:
        """Leave the cluster: what was sent is answered first (for up to a second). Idempotent.

        In a forked child this only marks the child's copy.

        Args:
            reason: why the cluster is lost: nothing is answered any more, and calls under way and
                later ones raise this. None: they raise `ClientClosed`.
            leave: False: end without a word, as a process that dies; a worker counts as dead.
        """
        self.connection.close(reason, leave=leave, drain=self.drain)
