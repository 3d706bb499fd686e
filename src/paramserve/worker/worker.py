"""The `Worker` that a training function is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from paramserve import seeding
from paramserve.checkpoint import plain
from paramserve.client import Client
from paramserve.client.saving import RANDOM
from paramserve.core.directory import NAME
from paramserve.errors import warn_user
from paramserve.messages import DatasetSize, SameSize
from paramserve.observe.history import StepsTaken
from paramserve.training.collectives import Collectives
from paramserve.training.course import Course
from paramserve.training.leases import Leases
from paramserve.training.notices import Notices
from paramserve.training.optimizers import Optimizers
from paramserve.training.position import Position

if TYPE_CHECKING:
    import torch

    from paramserve.codecs.base import Codec
    from paramserve.consistency.base import Policy
    from paramserve.pytorch.batches import KeysOf
    from paramserve.pytorch.leased import LeasedLoader
    from paramserve.pytorch.loader import Loader
    from paramserve.pytorch.process_group import StartedGroup
    from paramserve.pytorch.registry import Registry
    from paramserve.rules.base import Rule
    from paramserve.training.host import PassesByDataset


RETURNED = "returned"
"""What a worker saves at its end: the step at which its function has returned."""


class ExtraState(Struct, frozen=True, array_like=True):
    """Body of the report "extra state": what `get_extra_state` gave of a group's modules, by name
    in the state dict, pickled."""

    group: str
    pickled: bytes


class Worker:
    """One rank of a run, as its training function sees it.

    Where `ps.connect` or a handle made it, it is a context manager that finishes at the end.

    Attributes:
        client: the key-value API: define, push, pull, tick.
        seed: of the run, equal on all ranks. In a run the global generators are seeded from it and
            `rank`; a process that `ps.connect` joined from does so itself.
        optimizers, leases, course, notices, passes, registry, load_state: as of
            `paramserve.training.host.Host`, for what it makes.
    """

    def __init__(
        self,
        client: Client,
        seed: int,
        report: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.client = client
        self.seed = seed
        self.registry: Registry | None = None
        self.passes: PassesByDataset = {}
        self.load_state: dict[str, dict[str, Any]] = {}
        self.optimizers = Optimizers(client)
        self.leases = Leases(client, self.optimizers)
        self.course = Course(client, self.optimizers)
        self.notices = Notices(client, report)
        self._looped = False
        """Whether a loader was iterated over with gradients on."""
        self._own_parts = 0
        """Loaders over this rank's own part on whose batches the ranks have agreed."""
        self._compared = False
        """Whether a loader was made, which `compare_size` was asked about."""
        self._report = report
        self._process_group: StartedGroup | None = None
        self._random: bytes | None = None
        """Random generators of an older incarnation; empty when no loader needs them any more,
        None: the servers were not asked."""
        self._position = Position(client, self.optimizers, self.course, self.leases)
        self._collectives = Collectives(client.connection, client.steps, self._position)

    def __repr__(self) -> str:
        return f"Worker(rank={self.rank}, workers={self.workers})"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Finish in order; after an error count as dead, so that the rank can come again."""
        if kind is None:
            self.finish()
        else:
            self._end_process_group()
            self.client.close(leave=False)

    @property
    def rank(self) -> int:
        """0 to `workers` - 1."""
        return self.client.rank

    @property
    def workers(self) -> int:
        """How many workers the run had when this one joined; `job.scale` may change it."""
        return self.client.connection.workers

    @property
    def incarnation(self) -> int:
        """Counts the restarts of this rank."""
        return self.client.connection.incarnation

    @property
    def clock(self) -> int:
        """Steps finished on the first adopted optimizer's group, with those of older incarnations.

        Where the others went on without this rank, as in a cluster served without `--restart` after
        it had died, it is at least that of the slowest of them when it came back.

        Before an optimizer is adopted: on the group "model", where `optimizer` puts it, if steps
        are known there, else on "default".
        """
        self._position.look()
        return self.client.clock(self._group)

    @property
    def _clock(self) -> int:
        return self.client.steps.clocks.get(self._group, 0)

    @property
    def _group(self) -> str:
        """The first one that this worker steps on, whose clock `clock` is."""
        return self.optimizers.groups[0]

    def go_on_drawing(self, *, first: bool = False) -> None:
        """Let the generators of this process go on where an older incarnation's were after its last
        step: where an optimizer is adopted (`first`), and again when the first batch after that is
        loaded. Where another incarnation may follow, each step tells where they are."""
        if self._random is None:
            again = self.incarnation > 1
            self._random = (self.client.saving.older(RANDOM) or b"") if again else b""
            if self.client.connection.restarts:
                self.client.saving.ask(RANDOM, self._draws)
        if self._random:
            seeding.restore(self._random)
        if not first:
            self._random = b""

    def _draws(self) -> bytes:
        self._random = b""
        return seeding.state()

    @property
    def missed(self) -> int:
        """Clocks that the others decided without this worker, as `ps.Sync(backup=)` allows: of the
        group whose clock `clock` is."""
        return self.client.steps.missed_by.get(self._group, 0)

    @property
    def retiring(self) -> bool:
        """Whether the run will do without this worker: `job.scale` has made it superfluous. Loaders
        end by themselves; a loop of your own should."""
        return self.client.steps.retiring

    def loop_with_gradients(self) -> None:
        """See `Host`."""
        self._looped = True

    def agree_on_batches(self, batches: int) -> int:
        """Agree on the batches of the rank whose part is the smallest.

        All ranks call it for their next loader over a part of their own. A rank that calls later
        gets what the others agreed on."""
        agreed = self._collectives.least(batches, self._own_parts + 1)
        self._own_parts += 1
        return agreed

    def compare_size(self, arguments: tuple[object, ...], size: int) -> None:
        """Warn where the dataset of this worker's first loader, which is to be the same on all
        ranks, has another length than on the rank that made its first one before.

        Later loaders may be one rank's alone, as for evaluation, and a worker that was started
        again or added may find the others at other ones: these are not compared.

        Args:
            arguments: of the loader; those of others are compared where theirs are the same.
        """
        first, self._compared = not self._compared, True
        alone = self.workers == 1 or self.incarnation > 1 or not self.client.steps.first
        if alone or not first:
            return
        message = DatasetSize(0, str(arguments), size)
        connection = self.client.connection
        first_size = connection.control.call(message, SameSize, timeout_s=connection.timeout_s)
        if first_size.size != size:
            warn_user(
                f"rank {self.rank} made a loader or sampler over {size} samples, and rank "
                f"{first_size.rank} over {first_size.size}: each takes its share of what is to be "
                "the same dataset on all ranks. Where each rank has a part of its own, give "
                'worker.loader(..., shards="own"), which shares nothing out'
            )

    @property
    def factor(self) -> float:
        """What the servers multiply this worker's gradients by from its next step on; 1 at first.

        `Sync` divides the weighted sum by the factors, so that only their proportions count. Under
        `ElasticAverage`, where workers send no gradients, it has no meaning.

        Raises:
            TypeError, ValueError: it is set to what is no finite number above 0. It is as before.
        """
        return self.client.steps.factor

    @factor.setter
    def factor(self, value: float) -> None:
        self.client.steps.factor = value

    def log(self, **values: Any) -> None:
        """Record numbers of this step; they come back in `Result.metrics`, as records with
        `time_s`, `rank`, `clock` and `values`.

        They are sent with the next heartbeat, after up to `Deadlines.heartbeat_s`, and at the end
        of the function, also where it raises. A worker that is killed loses what was not sent.

        Args:
            values: numbers, or arrays and tensors of one element.
        Raises:
            TypeError: a value is no number. Nothing was recorded.
            ValueError: an int is too large for a float, or a name is none: as those of tensors it
                has no control characters. Nothing was recorded.
        """
        clock = max(self.client.steps.clocks.values(), default=0)
        numbers = {name: _number(name, value) for name, value in values.items()}
        self.client.connection.log(clock, numbers)

    def save(self, name: str, value: Any) -> None:
        """Keep what of the training function is to come back: `saved` has it, after a restart of
        the worker and in a run that is resumed.

        It goes to the servers with the next step, and counts if that step does: who goes on behind
        the step finds what was saved before it, who takes the step again does not. So save before
        the step, or give a function, which is asked at each step:

            losses = worker.saved("losses", [])
            worker.save("losses", lambda: losses)

        An object with a `state_dict` needs one line, `track`. The random generators of python,
        numpy and torch, and loaders, go on by themselves.

        Args:
            value: None, numbers, text, bytes, arrays, tensors, and lists, tuples and dicts of
                these; or a function that gives such a value and makes no call of the client.
        Raises:
            TypeError: it cannot be stored without pickling, or would come back as another type, as
                a namedtuple or an Enum; the part is named. What a function gave raises in the step,
                which is not made. Nothing was changed.
            Overloaded: all names together are over 4 MiB. Nothing was changed.
        """
        self.client.saving.save(name, value)

    def saved(self, name: str, default: Any = None) -> Any:
        """What was saved last under a name, as a copy with tensors on the CPU; see `save`.

        Args:
            default: returned where nothing was.
        """
        self.client.steps.clock_read = True  # the function knows where it goes on
        self._position.look()
        value = self.client.saving.find(name)
        return default if value is None else plain.load(value)

    def track(self, name: str, thing: Any) -> None:
        """Restore an object in a worker that is started again and in a run that is resumed:
        anything with `state_dict` and `load_state_dict`, as an average of the weights, a sampler or
        a scheduler. Its state goes to the servers with each step.

        Example:
            ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=...)
            worker.track("ema", ema)

        A scheduler of an adopted optimizer goes with the steps of that one, as with `schedulers=`
        of `optimizer`: workers that are added have it, too. Any other object is this rank's own,
        and comes back as of the last step: what the function did to it behind that is not in it.

        Args:
            name: of this object in each incarnation; another object takes the place of one that had
                the name.
            thing: its state holds what `save` takes, and counts in the sizes said there; those of
                an optimizer's schedulers have 64 KiB together.
        Raises:
            TypeError: it lacks one of the methods, or its state cannot be stored without pickling.
            ValueError: it is a scheduler of an optimizer that the worker does not step yet.
            Overloaded: as `save`. In all cases nothing was changed. A later state raises the first
                or the last in the step, which is not made.
        """
        if "torch" in sys.modules:
            from paramserve.pytorch.tracking import track_scheduler

            if track_scheduler(name, thing):
                return
        self.client.saving.track(name, thing)

    def print0(self, *values: object, sep: str = " ", end: str = "\n", flush: bool = True) -> None:
        """`print` on rank 0, and nothing on the others."""
        if self.rank == 0:
            print(*values, sep=sep, end=end, flush=flush)

    def optimizer(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Rule,
        *,
        name: str = "model",
        overlap: bool = False,
        weight: float | Callable[[], float] | None = None,
        clip_norm: float | None = None,
        buffers: str = "rank0",
        consistency: Policy | None = None,
        dense: str = "servers",
        push: Codec | Mapping[str, Codec | None] | None = None,
        pull: Codec | Mapping[str, Codec | None] | None = None,
        schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler] = (),
    ) -> torch.optim.Optimizer:
        """Let an optimizer step on the servers; rank 0's model defines all ranks' values.

        All ranks call this at the same point. When it returns, the model has rank 0's values. State
        that the optimizer has already (from `load_state_dict`) goes to the servers, from rank 0.
        Frozen parameters (`requires_grad=False`) stay where they are, of any dtype: no server has
        them, so they have to be equal on all ranks. One that the optimizer has and that is unfrozen
        later is trained from the next step on; all ranks unfreeze it before the same step.
        Modules on tables that the model has are found, and their rows go with each step; see
        `paramserve.pytorch.tables`.

        Under `ps.LocalSteps`, `ps.AsyncLocalSteps` and `ps.ElasticAverage` the optimizer makes the
        steps itself, on this worker; it may then be of any class, and one clock is `every` steps.
        Its state stays here too, is what `state_dict()` gives, and is lost if the worker has to be
        started again: it goes on with the servers' values and a fresh state.

        Args:
            model: its parameters and buffers make up the result, under their names in it.
            optimizer: of any torch.optim class but LBFGS and SparseAdam, of parameters in float32
                or float64, or in bfloat16 or float16: of these the servers keep float32 masters,
                which results and checkpoints have, and workers get values rounded once. SGD, Adam,
                AdamW (both without `amsgrad`), RMSprop, Adadelta, Adamax and NAdam are compiled;
                the others run as themselves on the servers. Or a rule, as `ps.Adagrad(lr=0.1)` or a
                `ps.CustomRule` of yours: it trains all parameters of the model, and its
                hyper-parameters are the options of the optimizer that is returned.
            name: of the group on the servers; another one for each optimizer of a worker. A
                parameter is stepped by the last optimizer that it was given to: an earlier one that
                has it too is refused at its next step, and its group keeps the values of that time.
            overlap: return after the push, so that communication and the next gradient overlap. The
                gradients of step k then come from the values after step k - 2. Not with own steps.
                The first gradient after a restart or a resume comes from those after k - 1: a Sync
                run with one is not bit by bit the unbroken run.
            weight: number of samples behind each gradient, or a function that tells it at each
                step; None: as the worker's loader knows it, else 1. Under `Sync` gradients are
                multiplied by it; "mean" divides by their sum. LocalSteps adds it up over the steps
                of an exchange.
            clip_norm: clip to this global norm, in Sync the reduced gradient, in Async this
                worker's, before an own step its gradient; None: no clipping.
            buffers: which of the model's buffers, as BatchNorm's running statistics, are in the
                result and in snapshots. Each rank trains with its own, whatever this says. "rank0":
                those of rank 0, which assigns them every ten steps and at the end. A worker that is
                started again begins with its own, an added one with rank 0's. "mean": as "rank0",
                but of floating point ones the mean of what each rank has told last, as often, also
                of one that has died since. "local": none; they are not sent, nor are frozen
                parameters compared.
            consistency: the policy of this optimizer's group, the same on all ranks; None: the
                run's.
            dense: "servers": they step the dense layers. "local": the optimizer does, here, and
                only rows of tables are sent; with several workers see `process_group` and
                `paramserve.pytorch.hybrid`.
            push: how gradients, or what the steps of `ps.LocalSteps` have changed, are encoded on
                their way to servers on other hosts, as in `push=ps.Int8()`; of parameters in
                float32, the same on all ranks. A dict has codecs by patterns of names, as in
                `push={"*.bias": None, "*": ps.Int4()}`: the first that matches counts, and what
                none matches is not encoded. None: nothing is, or as `LocalSteps` says.
            pull: the same for values, as in `pull=ps.BFloat16()`, or of what has changed of them,
                as in `pull=ps.Delta(ps.Int4())`: the model has rounded ones then, and the servers
                and the result whole ones.
            schedulers: the learning rate schedulers that were made from the optimizer, for a worker
                that is started again or added, and a run that is resumed: they have the group's
                state there. For one that is made later see `track`.
        Returns:
            The same object, whose class is now a subclass of its own class; of a rule, a torch
            optimizer.
        Raises:
            TypeError, ValueError: an argument is not supported. Nothing was defined.
            DefineTimeout: rank 0 did not define the model in time.
            DefineMismatch: the group was defined with another policy, or another rule.
            CodecMismatch: it was with other codecs.
        """
        from paramserve.pytorch.optimizer import adopt

        return adopt(
            self,
            model,
            optimizer,
            name=name,
            overlap=overlap,
            weight=weight,
            clip_norm=clip_norm,
            buffers=buffers,
            consistency=consistency,
            dense=dense,
            push=push,
            pull=pull,
            schedulers=schedulers,
        )

    def tell_extra_state(self, group: str, states: dict[str, Any]) -> None:
        """Give the run's result what modules keep beside parameters and buffers; warn where it
        cannot be pickled."""
        if self._report is None:
            return
        names = ", ".join(states)
        try:
            from paramserve.pytorch.pickling import dumped

            body = ExtraState(group, dumped(states))
        except Exception as error:  # a user's class may raise anything
            warn_user(
                f"the result lacks {names}, which cannot be pickled: {type(error).__name__}: "
                f"{error}. Load it with strict=False"
            )
            return
        self._report("extra state", msgspec.msgpack.encode(body))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here. What they have sent before is then in the servers' values.

        All ranks make this call at the same point. Which ranks are waited for, also after deaths
        and restarts, is said in `all_reduce`.

        Example:
            if worker.rank == 0:
                users.from_parquet("users.parquet")
            worker.barrier()  # now all ranks read the loaded rows

        Args:
            timeout_s: None: `Deadlines.request_s` for a rank that has not joined, and
                `Deadlines.busy_s` for ranks that live.
        Raises:
            Timeout: not all came in time; the text names the missing ones.
            ParamServeError: another rank made another call, as `all_reduce`. Or an error of a step
                that was not read before.
        """
        self.client.drain()
        self._collectives.barrier(timeout_s)

    def assign(self) -> None:
        """Have the servers and all ranks take what rank 0's models hold now: the way to write
        values between two steps, as to go back to the best model.

        All ranks make this call at the same point. It overwrites what the optimizers of
        `worker.optimizer` train; their state stays, and so do rows of tables. What any rank has
        sent before is in none of the values. Where rank 0 has died for good, the lowest rank that
        lives takes its place. One that was started again writes nothing before its first step, and
        warns: what it had assigned before it died is there, and a write that it died in is lost.

        Example:
            model.load_state_dict(best)   # on rank 0 at least
            worker.assign()
        Raises:
            ShapeMismatch: a parameter has another shape than when it was defined. Nothing of its
                block was applied.
            Timeout: not all ranks came in time; the text names the missing ones.
        """
        if self.registry is not None:
            from paramserve.pytorch.assigning import assign

            assign(self, self.registry)

    def all_reduce(self, value: Any, op: str = "mean", *, timeout_s: float | None = None) -> Any:
        """The sum, mean, maximum or minimum of a value over all ranks, or rank 0's: the same on
        each, bit for bit.

        For metrics, and for what all ranks have to agree on, such as the loss that a scheduler
        goes by. It goes through the coordinator; gradients go with `optimizer`. All ranks make the
        same calls in the same order, with numbers, or with arrays or tensors of one shape and
        dtype.

        Each rank that lives or has not joined yet is waited for. One that has left, died, or is
        being restarted is not, which warns; until the first step a restart is waited for, and with
        `op="rank0"` that of rank 0 always. Where all others have
        ended, and one of them returned by itself without this call, it is an error. A rank that was
        restarted or added begins its function anew: its calls give what the others got at that
        point, until it has reached theirs. Restarted in a loop over `range(worker.clock,
        n)`, it goes on with those of that step: ask for the clock behind the calls of the setup.
        A rank that is to end gets its own value.

        Example:
            loss = worker.all_reduce(evaluate(model))
            scheduler.step(loss)  # ReduceLROnPlateau, with one loss on all ranks

        Args:
            value: a number, an array or a tensor, of at most `Limits.reduce_bytes_max`. Numbers, of
                Python or numpy scalars, may be ints on some ranks and floats on others: then all
                are floats. A bool counts as 0 or 1.
            op: "mean", "sum", "max" or "min". Each rank counts once in a mean: where ranks have
                different numbers of samples, reduce sums. Or "rank0": the value of rank 0, as what
                it alone has evaluated; the others give one of its kind, which is not used.
            timeout_s: as for `barrier`.
        Returns:
            Of the value's kind: a number, or an array or tensor of its shape, dtype and device.
            The mean of integers is floating point, the sum or maximum of bools an int.
        Raises:
            TypeError, ValueError: the value or the op. Nothing was sent.
            Timeout: not all ranks came in time; the text names the missing ones.
            Overloaded: the value is too large.
            ParamServeError: another rank made another call, or the others returned without it; or
                rank 0, whose value it is.
        """
        return self._collectives.all_reduce(value, op, timeout_s)

    @property
    def returned_before(self) -> bool:
        """Whether the function of an older incarnation has returned at the step where this one goes
        on, so that nothing that follows that step is left."""
        resumed = self.client.steps.resumed.get(self._group, 0)
        return self.client.saving.latest(RETURNED) == b"%d" % resumed

    def tell_steps(self) -> None:
        """Give the run's result what is kept of this worker's steps."""
        if self._report is not None:
            for name, history in self.optimizers.histories.items():
                steps = StepsTaken(name, history.records())
                self._report("steps", msgspec.msgpack.encode(steps))

    def process_group(
        self,
        backend: str | None = None,
        *,
        host: str | None = None,
        timeout_s: float | None = None,
    ) -> torch.distributed.ProcessGroup:
        """The group of all workers of the run for `torch.distributed`, which is its default group.

        For dense layers that are averaged among the workers, beside tables on the servers:

            worker.process_group()
            model = DistributedDataParallel(model)
            optimizer = worker.optimizer(model, optimizer, dense="local")

        All ranks call it at the same point; a second call gives the same group. It is ended with
        the worker. It listens on loopback where the whole cluster does, and otherwise on the
        address by which this worker reaches the coordinator. What is sent in it is not protected:
        between machines it needs a network that you trust. NCCL chooses its network by its own
        variables (`NCCL_SOCKET_IFNAME`).

        It stands as long as all its workers do: a worker that ends breaks it for the others, whose
        next operation raises, and one that is started again, or added, cannot join it.

        Args:
            backend: as for `torch.distributed.init_process_group`, the same on all ranks. None:
                "gloo" and, if each worker's present CUDA device is one of its own, NCCL for CUDA
                tensors.
            host: the address of this worker's host for the others; None: as said above.
            timeout_s: until all workers are there, and then of each operation; the client's if
                None.
        Raises:
            ParamServeError: this worker was started again, or came later than the others; or this
                process has a process group already.
            Timeout: not all workers came in time; the text names the missing ones. In both
                cases there is no process group afterwards.
        """
        from paramserve.pytorch.process_group import start

        if self._process_group is None:
            self._process_group = start(self.client, backend, host=host, timeout_s=timeout_s)
        return self._process_group.group

    def loader(
        self,
        dataset: torch.utils.data.Dataset[Any],
        *,
        batch_size: int,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = True,
        batches_per_step: int | None = None,
        resume: bool = True,
        shards: str | None = None,
        adaptive_batch: tuple[int, int] | None = None,
        name: str | None = None,
        prefetch: KeysOf | None = None,
        **dataloader_options: Any,
    ) -> Loader | LeasedLoader:
        """This rank's batches, as many on every rank, or as each has the time for.

        The dataset is the same on all ranks, and each gets its share. With `shards="own"` it is the
        rank's own part, all of which is this rank's.

        `len` is the number of batches of one iteration; with `shards="dynamic"` it is an estimate.

        The order depends on the run's seed and the epoch only. A loader made again with the same
        dataset and arguments goes on with the epochs that follow: in each round of a loop over
        epochs all samples come, in a new order. `for epoch in loader.epochs(10, start=0):` is such
        a loop that begins, in a worker that was started again, at the epoch that is not done.

        A worker that was started again goes on where its older incarnation was: of the first
        loaders with `resume` that it iterates, the batches of `worker.clock` steps are left out.

        With `shards="dynamic"` each rank gets as many samples as it has the time for; what a worker
        that died had not finished goes to another. Its loop ends when all ranks have finished.

        Args:
            dataset: map-style, with a length. A `TensorDataset` is read a batch at a time.
            batch_size: samples in each batch of one rank.
            epochs: passes over the dataset.
            steps: number of batches instead of `epochs`: passes are added or cut as it needs.
            shuffle: a new order for each epoch, from (seed, epoch).
            batches_per_step: batches of one step on the servers, as where their gradients are added
                up; None: 1, or as many as `ps.LocalSteps` or `ps.ElasticAverage` make own steps, if
                that is the adopted optimizer's policy when the iteration begins. Left over batches
                belong to no step, but own steps of a leased loader are exchanged at its end.
            resume: with static shards, False for a loader that is not stepped with, as for
                evaluation, if it is iterated before the training loader has reached its place.
            shards: "static" (None): equal shares. "dynamic": as each rank has the time for; `steps`
                is the mean over the ranks. "own": the dataset is this rank's part already, as
                `parts[worker.rank]`: an epoch has as many batches on every rank as the smallest
                part has whole ones, in each epoch of other samples. All ranks make such loaders at
                the same point, in one order. A rank that is added or started again keeps to what
                the others agreed on: a ValueError if its part has fewer batches.
            adaptive_batch: smallest and largest batch of a rank. Shares batch_size x workers
                samples by the measured speed of each. Implies "dynamic".
            name: of a leased loader, the same on all ranks; None: by the order in which they are
                made.
            prefetch: a function that gives the keys of a batch, as {module, table or name: keys} or
                pairs. While one batch is computed the next one is loaded, and its rows are on their
                way, one step older. On a table under `ps.Sync` it gains nothing.
            dataloader_options: as `torch.utils.data.DataLoader` takes them, except for `sampler`,
                `batch_sampler` and `drop_last`.
        Raises:
            TypeError: an unknown or excluded option, a number that is not an int, or a dataset
                without length.
            ValueError: a number is out of its range, or the dataset has no whole batch for every
                worker (with "dynamic" and "own": for one).
        Source: leases are guided self-scheduling, Polychronopoulos and Kuck, IEEE Transactions on
            Computers C-36(12), 1987.
        """
        from paramserve.pytorch.loader import load

        return load(
            self,
            dataset,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            shuffle=shuffle,
            batches_per_step=batches_per_step,
            resume=resume,
            shards=shards,
            adaptive_batch=adaptive_batch,
            name=name,
            prefetch=prefetch,
            **dataloader_options,
        )

    def sampler(
        self,
        dataset: torch.utils.data.Dataset[Any],
        *,
        shuffle: bool = True,
        shards: str = "static",
        **sharing: Any,
    ) -> torch.utils.data.Sampler[Any]:
        """This rank's part of a dataset, for a `DataLoader` of your own.

        Each iteration is the next epoch, also of a sampler that is made again with the same dataset
        and arguments; `set_epoch(number)` chooses another one.

        Args:
            dataset: map-style, with a length.
            shuffle: a new order for each epoch, from (seed, epoch).
            shards: "static": gives indices, for `sampler=`; "dynamic": gives batches of indices
                that are leased to this rank, for `batch_sampler=`.
            sharing: with "dynamic" `batch_size`, and `epochs`, `steps`, `batches_per_step`,
                `adaptive_batch` and `name` as `loader` takes them.
        Raises:
            TypeError: the dataset has no length, or an argument belongs to the other kind.
            ValueError: it has fewer samples than there are workers, or than a batch.
        """
        from paramserve.pytorch.loader import sampler

        return sampler(self, dataset, shuffle=shuffle, shards=shards, **sharing)

    @property
    def trains_alone(self) -> bool:
        """Whether batches were gone through with gradients on, and no server knows of it.

        By what this client knows: the cluster may have ended. A loop that reduces arrays may
        average gradients or values by itself; metrics and decisions are mostly single numbers.
        """
        if not self._looped or self.optimizers.histories:
            return False
        if self._process_group or self._collectives.arrays:
            return False
        return not (self.client.steps.clocks or self.client.connection.exchange.blocks)

    def _end_process_group(self) -> None:
        group, self._process_group = self._process_group, None
        if group is not None:
            group.end()

    def finish(self) -> None:
        """End in order: install what is outstanding, then leave the cluster."""
        self.optimizers.finish()
        if self.load_state and self.rank == 0:
            names = ", ".join(name or "the first one" for name in self.load_state)
            warn_user(
                f"load_state was not loaded for the optimizer that it names ({names}): no "
                "worker.optimizer(..., name=) has taken it"
            )
        self.tell_steps()
        if self.trains_alone:
            self.notices.warn_of_having_trained_alone()
        self.notices.report_nothing_left(self._group)
        if waiting := self.client.steps.staged.unapplied():
            warn_user(
                f"rank {self.rank} ends with pushes that wait for a tick: {waiting}. They are not "
                "applied: the group's policy collects the pushes of a step until client.tick(group)"
                ", or push_pull(..., tick=True), ends it"
            )
        self._end_process_group()
        if self.client.connection.restarts and self._clock:
            self.client.saving.keep(RETURNED, b"%d" % self._clock)
        self.client.steps.tell_saved()
        self.client.drain()
        self.client.close()


def _number(name: str, value: Any) -> float:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"worker.log: the name {name[:80]!r} is empty, longer than 512 characters or has "
            "control characters"
        )
    try:
        plain = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # torch and numpy: more than one element
        plain = None
    if not isinstance(plain, int | float):
        raise TypeError(
            f"worker.log takes numbers, but {name} is {type(value).__name__}: {value!r}"
        )
    try:
        return float(plain)
    except OverflowError:
        raise ValueError(f"worker.log: {name} is too large for a float") from None
