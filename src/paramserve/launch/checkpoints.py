"""What a run saves and starts from, and its checkpoints as its driver uses them: where they go,
which one it goes on from.

They are written by the coordinator and the servers, and read by the processes that go on from one;
the driver only chooses which.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from msgspec.structs import replace

from paramserve.checkpoint.folder import Folder, split_path
from paramserve.checkpoint.locations import storage_at, whole_path
from paramserve.checkpoint.manifest import Manifest
from paramserve.checkpoint.reader import Checkpoint as Saved
from paramserve.checkpoint.storage import Storage, telling
from paramserve.config import CheckpointPlan, Resumed, check_count, check_number
from paramserve.errors import CheckpointDamaged, CheckpointError, ParamServeError, shown
from paramserve.launch.life import Selection
from paramserve.messages import CheckpointReport, Status
from paramserve.observe.amounts import trained_only
from paramserve.observe.checkpoints import (
    CheckpointStatus,
    checkpoint_status,
    clocks_in_words,
)

logger = logging.getLogger("paramserve")

EVERY_S = 60.0
"""Seconds between two checkpoints, if nothing else is said."""
RESTORE_BYTES_S = 20e6
"""What a server reads of a checkpoint in a second, at least: it may take that long to be up."""
REFUSED_NAMED = 3
"""Checkpoints that cannot be read and are named in one error."""

OnServerDeath = Literal["resume", "stop"]
Path = str | os.PathLike[str]


class ModelValues(Protocol):
    """The part of a `Result` that models start from."""

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def steps(self) -> Mapping[str, Any]: ...

    def state_dict(self, name: str = ...) -> dict[str, Any]: ...


ModelSource = ModelValues | Mapping[str, Any] | Path
RowSource = Path | Mapping[str, Path]
OF_FOLDER = ("every_s", "every_steps", "keep", "strict", "on_server_death")
"""Fields of `Checkpoint` about the checkpoints in its folder."""
OF_VALUES = ("load_state", "load_tables", "save_tables")
"""Fields of `Checkpoint` about files besides checkpoints."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a run saves and what it starts from, for `checkpoint=` of `run` and `start`.

    With a path it writes checkpoints there. Without one it only reads and writes the files of
    `load_state`, `load_tables` and `save_tables`. A run that goes on from a checkpoint has the
    values of that one; `load_state` and `load_tables` are for models and tables that are not in it.

    Example:
        ps.run(train, checkpoint=ps.Checkpoint("runs/a", every_s=60, keep=3))
        ps.run(train, checkpoint=ps.Checkpoint(load_state="model.pt", save_tables="trained"))

    Args:
        path: a folder that the driver and every server's machine see under this path, for this run
            alone. It is made if it is missing. Or the URL of one that fsspec reaches, such as
            "s3://bucket/run". None: the run writes no checkpoints; the options of these, `every_s`
            to `on_server_death`, are refused then.
        every_s: seconds between two; None: 60, unless `every_steps` says when.
        every_steps: steps of the slowest worker between two; None: not by steps. With both, what
            comes first.
        keep: how many of the newest stay.
        strict: whether the run ends where a checkpoint cannot be written, as on a full disk. If
            not, it trains on: the live view and the result tell of it, and the next one is tried.
        on_server_death: "resume": when a server or the coordinator ends, the run goes on from its
            newest checkpoint by itself, and `Result.rollbacks` tells of it; "stop": the run ends
            with the error. None: "resume" of `run` and `start`, and "stop" of `serve`, which takes
            nothing else: others start its servers again, and they begin with the newest checkpoint.
        load_state: what the models of `worker.optimizer` start from instead of their own values: a
            state dict, the path of one that `torch.save` wrote, or a `Result`. It is for the first
            optimizer; a result, or a dict of state dicts, goes by the optimizers' names. Keys and
            shapes must be the model's. Every rank loads it, frozen parameters and buffers included.
            Like the two below, it is not for `serve`.
        load_tables: rows that keyed tables begin with: the folder of an earlier `save_tables`, or a
            dict of such files by table. They are there before any worker gets the table; with the
            rule's state, if the file has that of the same rule. The workers' machines must see the
            files. While one loads, the others wait up to `Deadlines.busy_s`.
        save_tables: folder for the keyed tables at the end or at `Job.stop`, as `<name>.parquet`
            with state, for `table.from_parquet`; None: rows end with the servers.
    Raises:
        ValueError, TypeError: an argument is of another kind, or too small; or there is neither a
            path nor one of the last three.
    """

    path: Path | None = None
    every_s: float | None = None
    every_steps: int | None = None
    keep: int = 3
    strict: bool = False
    on_server_death: OnServerDeath | None = None
    load_state: ModelSource | None = field(default=None, repr=False)
    load_tables: RowSource | None = None
    save_tables: Path | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            whole_path("path of Checkpoint", self.path)
        if self.every_s is not None:
            check_number("every_s of Checkpoint", self.every_s, above=0.0)
        if self.every_steps is not None:
            check_count("every_steps of Checkpoint", self.every_steps)
        check_count("keep of Checkpoint", self.keep)
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict of Checkpoint must be True or False, not {self.strict!r}")
        if self.on_server_death not in ("resume", "stop", None):
            raise ValueError(
                'on_server_death of Checkpoint must be "resume", "stop" or None, not '
                f"{self.on_server_death!r}"
            )
        if self.path is None:
            self._check_without_path()

    def _check_without_path(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name in OF_FOLDER and value != each.default:
                raise ValueError(
                    f"{each.name}={value!r} of Checkpoint is for the checkpoints that a run "
                    f"writes, and needs their folder: Checkpoint(path, {each.name}={value!r})"
                )
        if all(getattr(self, name) is None for name in OF_VALUES):
            raise ValueError(
                "Checkpoint needs a path to write checkpoints to, or load_state=, load_tables= or "
                "save_tables="
            )


def as_checkpoint(option: Checkpoint | Path | None) -> Checkpoint | None:
    """What `checkpoint=` gives: a path alone means the folder. Raises as `Checkpoint`."""
    return option if option is None or isinstance(option, Checkpoint) else Checkpoint(option)


def check_served(option: Checkpoint | Path | None) -> None:
    """For `serve`. Raises `ValueError` for fields that only `run` and `start` follow."""
    if isinstance(option, Checkpoint):
        if option.on_server_death == "resume":
            raise ValueError(
                'on_server_death="resume" of Checkpoint is for ps.run and ps.start, which start '
                "servers again by themselves: leave it out. A cluster of ps.serve ends with a "
                "server that ends; start it again, and it begins with its newest checkpoint"
            )
        for name in OF_VALUES:
            if getattr(option, name) is not None:
                raise ValueError(
                    f"{name}= of Checkpoint is for ps.run and ps.start: the workers of a served "
                    "cluster load what they start from themselves, and "
                    "ps.attach(address).save_tables(folder) writes tables"
                )


class ResumePoint(NamedTuple):
    """A checkpoint to go on from."""

    folder: str
    manifest: Manifest

    @property
    def path(self) -> str:
        return f"{shown(self.folder)}/{self.manifest.name}"

    @property
    def restore_s(self) -> float:
        """How much longer servers that read it may take to be up."""
        return self.manifest.nbytes / RESTORE_BYTES_S


class Recovery:
    """The checkpoints of a run: where it writes them, and the one that it goes on from.

    Args:
        run: its name, for others that would write to the same folder.
        settings: None: it writes none.
        source: a folder with the checkpoint that it begins with, and the name of that one; no name:
            the newest that is not damaged; None: it begins anew.
        required: whether there must be one in `source`.

    Attributes:
        resume_point: the checkpoint to go on from now; None: from the beginning.
    """

    def __init__(
        self,
        run: str,
        settings: Checkpoint | None,
        source: tuple[str, str | None] | None = None,
        *,
        required: bool = False,
    ) -> None:
        self.run = run
        self.settings = settings
        self.folder = whole_path("path", settings.path) if settings is not None else ""
        """Folder it writes to, whatever the process's working directory is later; empty: it writes
        none."""
        self.resume_point: ResumePoint | None = None
        self._source = source
        self._required = required
        self._refused: dict[tuple[str, int], ParamServeError] = {}
        """Why a checkpoint is damaged, by folder and number."""
        self._written = self._failed = 0
        """Counts of processes that have ended."""
        if source is not None:
            self.resume_point = self._first(*source)

    @property
    def resumes(self) -> bool:
        """Whether it goes on from one when a server or the coordinator has ended."""
        return self.settings is not None and self.settings.on_server_death != "stop"

    @property
    def strict(self) -> bool:
        """Whether it ends where a checkpoint cannot be written."""
        return self.settings is not None and self.settings.strict

    def line(self) -> str:
        """What the run begins with, in one sentence; empty: it was not told to go on."""
        if self.resume_point is not None:
            at = clocks_in_words(trained_only(self.resume_point.manifest.cut.clocks))
            return f"the run goes on from the checkpoint {self.resume_point.path}{at}"
        if self._source is not None:
            return f"{shown(self._source[0])} has no checkpoint to go on from: the run begins anew"
        return ""

    def seed(self, argument: int | None) -> int | None:
        """The seed of the checkpoint, where it goes on from one, else the given one.

        Raises:
            ValueError: another one is given.
        """
        saved = self.resume_point.manifest.cut.seed if self.resume_point is not None else None
        if saved is None or argument in (None, saved):
            return saved if saved is not None else argument
        assert self.resume_point is not None
        raise ValueError(
            f"seed={argument} is not that of the checkpoint {self.resume_point.path}, which is "
            f"{saved}: the order of samples and all random numbers go on from there. "
            "Leave seed= out"
        )

    def plan(self, seed: int | None) -> CheckpointPlan:
        """What the processes of the next attempt are told."""
        start, settings = self.resume_point, self.settings
        resumed = None
        if start is not None and start.folder == self.folder:
            cut, age_s = start.manifest.cut, max(time.time() - start.manifest.created_s, 0.0)
            resumed = Resumed(cut.clocks, age_s, start.manifest.nbytes, cut.pause_s)
        plan = CheckpointPlan(
            run=self.run,
            seed=seed,
            resume_folder=start.folder if start is not None else "",
            resume=start.manifest.name if start is not None else "",
            resumed=resumed,
            restore_s=start.restore_s if start is not None else 0.0,
        )
        if settings is None:
            return plan
        every_s, every_steps = settings.every_s, settings.every_steps
        if every_s is None and every_steps is None:
            every_s = EVERY_S
        return replace(
            plan,
            folder=self.folder,
            claimed=True,
            every_s=every_s if every_s is not None else 0.0,
            every_steps=every_steps if every_steps is not None else 0,
            keep=settings.keep,
        )

    def status(self, latest: Status | None) -> CheckpointStatus | None:
        """How the checkpoints stand, with what the coordinator has told; None: the run writes none.
        The last one may be that which it has begun with."""
        if self.settings is None:
            return None
        saved = latest.checkpoints if latest is not None else None
        status = checkpoint_status(saved or CheckpointReport(folder=shown(self.folder)))
        if not status.path and self.resume_point is not None:
            manifest = self.resume_point.manifest
            status = dataclasses.replace(
                status,
                path=self.resume_point.path,
                clocks=trained_only(manifest.cut.clocks),
                age_s=max(time.time() - manifest.created_s, 0.0),
                bytes=manifest.nbytes,
                pause_s=manifest.cut.pause_s,
            )
        written, failed = status.written + self._written, status.failed + self._failed
        return dataclasses.replace(status, written=written, failed=failed)

    def attempt_over(self, last: Status | None) -> None:
        """The coordinator that has told this has ended, and another one will tell."""
        if last is not None and last.checkpoints is not None:
            self._written += last.checkpoints.committed
            self._failed += last.checkpoints.failed

    def select(
        self, cause: ParamServeError, damaged: bool, last: Status | None = None
    ) -> Selection:
        """Choose the newest checkpoint of the run that is not damaged; if there is none, the one
        that it began with; if it has written none, its beginning.

        Args:
            cause: why one is chosen.
            damaged: it says that a process could not read the chosen one, which is left out.
            last: by the coordinator that has ended, last.
        """
        before = self.resume_point
        if damaged and before is not None:
            self._leave_out(before.folder, before.manifest.number, cause)
        try:
            self._choose()
            report = last.checkpoints if last is not None else None
            written = self._written + (report.committed if report is not None else 0)
            if self.resume_point is None and written and not damaged:
                many = "s" * (written > 1)
                raise CheckpointError(
                    f"the run has written {written} checkpoint{many} to {shown(self.folder)}, and "
                    "none is there",
                    fix="look who has removed them; to begin anew, start the run again",
                )
        except CheckpointError as none_left:
            return Selection(error=none_left)
        point = self.resume_point
        return Selection(point.path, point.restore_s) if point is not None else Selection()

    def _choose(self) -> None:
        """Raises `CheckpointError`: there is none, and there must be one; or none of those that
        there are can be read."""
        self.resume_point, refused = self._newest(self.folder, lambda each: each.run == self.run)
        if self.resume_point is None and self._source is not None:
            self.resume_point = self._first(*self._source)
        if self.resume_point is None and refused:
            raise _unreadable(self.folder, refused)

    def _first(self, folder: str, name: str | None) -> ResumePoint | None:
        if name is not None:
            manifest = Folder(storage_at(folder)).named(name)
            self._check(folder, manifest)
            return ResumePoint(folder, manifest)
        newest, refused = self._newest(folder, lambda each: True)
        if newest is None and refused:
            raise _unreadable(folder, refused)
        if newest is None and self._required:
            raise CheckpointError(
                f"resume={shown(folder)!r} has no checkpoint to go on from",
                fix="name a folder that a run has written checkpoints to, or leave resume= out",
            )
        return newest

    def _newest(
        self, folder: str, accept: Callable[[Manifest], bool]
    ) -> tuple[ResumePoint | None, list[CheckpointError]]:
        """The newest one of a folder that is wanted and can be read, and why later ones cannot."""
        refused = list[CheckpointError]()
        if not folder or not _is_there(storage := storage_at(folder)):
            return None, refused
        there = Folder(storage)
        for number in there.numbers():
            try:
                manifest = there.load(number)
                if accept(manifest):
                    self._check(folder, manifest)
                    return ResumePoint(folder, manifest), refused
            except CheckpointDamaged as error:
                self._leave_out(folder, number, error)
                refused.append(error)
        return None, refused

    def _check(self, folder: str, manifest: Manifest) -> None:
        """See that its files are there. Each process reads its part, and compares hashes then."""
        refusal = self._refused.get((folder, manifest.number))
        if refusal is not None:
            raise refusal
        with Saved(storage_at(folder), manifest) as saved:
            saved.check()

    def _leave_out(self, folder: str, number: int, error: ParamServeError) -> None:
        if (folder, number) not in self._refused:
            self._refused[folder, number] = error
            logger.warning("paramserve: a checkpoint is left out: %s", error)


def _is_there(storage: Storage) -> bool:
    """Whether there is such a folder; one that cannot be read may have checkpoints."""
    with telling(storage, "checkpoints cannot be looked for"):
        try:
            storage.entries("")
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _unreadable(folder: str, refused: Sequence[CheckpointError]) -> CheckpointError:
    many, more = len(refused), len(refused) - REFUSED_NAMED
    whys = [each.failed for each in refused[:REFUSED_NAMED]]
    whys += [f"and {more} more"] if more > 0 else []
    which = f"none of the {many} checkpoints" if many > 1 else "the only checkpoint"
    can = "can" if many > 1 else "cannot"
    return CheckpointError(
        f"{which} in {shown(folder)} {can} be read: {'; '.join(whys)}",
        applied="no",
        fix="look at the folder's storage, or copy the files back from a backup; to begin anew, "
        "remove the folder or name another one",
    )


def recovery_of(
    run: str, checkpoint: Checkpoint | Path | None, resume: bool | Path
) -> Recovery | None:
    """What `run` and `start` are given about checkpoints; None: nothing.

    Args:
        run: the name of the training function.
    Raises:
        ValueError, TypeError: wrong arguments, or they do not go together.
        CheckpointFolderTaken: a living run writes to the folder.
        CheckpointError: the folder has something else in it, or checkpoints of another run that is
            not to go on; it cannot be used; the checkpoint to go on from is not there, or damaged.
    """
    settings = as_checkpoint(checkpoint)
    if settings is not None and settings.path is None:
        settings = None
    if resume is True and settings is None:
        raise ValueError(
            "resume=True goes on from the newest checkpoint in the path of checkpoint=, which has "
            "none: give checkpoint=path, or resume=path"
        )
    source = None
    if not isinstance(resume, bool):
        source = split_path(whole_path("resume", resume))
    elif resume and settings is not None:
        source = whole_path("path", settings.path), None
    if settings is None and source is None:
        return None
    name = f"{run}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    required = not isinstance(resume, bool)
    recovery = Recovery(name, settings, source, required=required)
    if settings is not None:
        _claim(recovery.folder, name, source)
    return recovery


def _claim(path: str, run: str, source: tuple[str, str | None] | None) -> None:
    """See that the run may write to a folder, which is made. The coordinator claims it for good."""
    storage = storage_at(path)
    with telling(storage, "the folder of checkpoints cannot be made"):
        storage.make()
    folder = Folder(storage)
    goes_on = source is not None and source[0] == path
    if not goes_on:
        _refuse_checkpoints(folder, storage.where)
    with folder.claimed(run):
        if not goes_on:  # of a run that was ending, which was waited for
            _refuse_checkpoints(folder, storage.where)


def _refuse_checkpoints(folder: Folder, where: str) -> None:
    """Raises `CheckpointError` if a folder has checkpoints."""
    numbers = folder.numbers()
    if numbers:
        whole, _ = folder.manifests()
        whose = f" of run {whole[0].run!r}" if whole else ""
        many = "s" * (len(numbers) > 1)
        raise CheckpointError(
            f"{where} has {len(numbers)} checkpoint{many}{whose} already",
            fix="go on from the newest by resume=True, or name another folder in checkpoint=",
        )
