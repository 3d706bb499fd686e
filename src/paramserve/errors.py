"""Every error that paramserve raises by itself, as a tree by what the caller can do.

`ValueError` and `TypeError` stay for a wrong argument, found before anything is sent.
An error's text always has the form *what failed. Applied: yes | no | unknown. To fix: ... More:
...*, whose end names the section of the reference with the error's cause and cure.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection
from difflib import get_close_matches
from types import FrameType
from typing import Any, Literal

INTERNAL = ("paramserve", "torch")
"""Packages whose lines no warning shows: torch's lie between a user's line and ours."""
Applied = Literal["yes", "no", "unknown"]
USERINFO = re.compile(r"\b(\w+)://([^/\s]*)@")
AZURE = re.compile(r"abfss?|az|adl|wasbs?")
"""Protocols whose URLs have the name of a container where others have a user's."""
REFERENCE = "docs/reference.md"
"""Where errors send their readers: the page of the repository and of the source distribution."""


class ParamServeError(Exception):
    """Base of all errors below.

    Args:
        failed: what failed, who, expected, actual.
        applied: whether the values on the servers were changed.
        fix: what to do about it.

    Attributes:
        result: of an error that ends a run: the `paramserve.Result` of what was done until then,
            for example `error.result.state_dict()`. None: there is none to read, and in every other
            error. A pickled error leaves it behind.
    """

    result: Any = None

    def __init__(self, failed: str, *, applied: Applied = "no", fix: str) -> None:
        super().__init__(failed)
        self.failed = failed
        self.applied: Applied = applied
        self.fix = fix

    def __str__(self) -> str:
        end = "\n\n" if "\n" in self.failed else ". "  # below a traceback
        text = f"{self.failed}{end}Applied: {self.applied}. To fix: {self.fix}"
        return f"{text}. More: {REFERENCE}#{section(type(self))}"

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self).__name__, self.failed, self.applied, self.fix)


class Timeout(ParamServeError):
    """A wait reached its deadline; the text names who is missing."""


class PushTimeout(Timeout):
    """No answer to a push in time. It was sent: wait on with its ticket's `result()` or with
    `client.drain()`, which repeat nothing. A second push would be another one."""


class PullTimeout(Timeout):
    """The values were not there in time."""


class ConnectTimeout(Timeout):
    """No process answered at an address, or the cluster was not complete in time."""


class DefineTimeout(Timeout):
    """A parameter was not defined in time by the one whose values define it."""


class RunTimeout(Timeout):
    """A run took longer than its `timeout_s`; it was stopped."""


class ServerGone(ParamServeError):
    """A server process ended, or hangs. Its values are lost."""


class CoordinatorGone(ParamServeError):
    """The coordinator process ended. Peers can no longer be authenticated."""


class WorkerFailed(ParamServeError):
    """A worker raised, was killed or could not start; the text holds its traceback."""


class WorkerFenced(ParamServeError):
    """The cluster counts this worker as dead, or a newer incarnation took its place."""


class RankTaken(ParamServeError):
    """A living worker of the cluster has this rank."""


class NameTaken(ParamServeError):
    """A living cluster has this name."""


class CannotPlace(ParamServeError):
    """The engine has no room for the processes that were asked for; the text names both."""


class RuleFailed(ParamServeError):
    """A registered rule raised, or left what no update may leave."""


class PolicyFailed(ParamServeError):
    """A registered policy raised, or answered what no policy may answer."""


class ClientClosed(ParamServeError):
    """The client was closed, its run has stopped, or it was made before a fork."""


class Overloaded(ParamServeError):
    """A limit was reached; the text names the limit."""


class TableFull(Overloaded):
    """A table has no room for the rows that a request would create; the text names its limit."""


class ProtocolError(ParamServeError):
    """The other side sent what the protocol does not allow, or refused to speak with us."""


class NotAuthenticated(ProtocolError):
    """The peer does not hold the cluster's token, or belongs to another user."""


class UnknownName(ParamServeError):
    """No parameter, block or group has this name."""


class UnknownRule(ParamServeError):
    """The servers were not started with this rule or policy."""


class UnknownCodec(ParamServeError):
    """A server or client does not have this codec."""


class CodecFailed(ParamServeError):
    """A codec of the user's own raised, or encoded or decoded what no codec may."""


class DefineMismatch(ParamServeError):
    """A name was defined again with another shape, dtype, rule or group."""


class CodecMismatch(DefineMismatch):
    """A rank gives another codec than those before it."""


class CollectiveMismatch(ParamServeError):
    """A rank calls `all_reduce` or `barrier` otherwise than it did before it was started again, or
    alone after the others have returned: its function would do so again."""


class ShapeMismatch(ParamServeError):
    """A gradient or value has another shape than its parameter, or their number is wrong."""


class DtypeMismatch(ParamServeError):
    """A gradient or value has a dtype that does not convert to its parameter's dtype."""


class NonFinite(ParamServeError):
    """A gradient or value holds NaN or Inf."""


class HyperMismatch(ParamServeError):
    """Workers sent different hyper-parameters, clipping or weights to one synchronous clock."""


class NotAMember(ParamServeError):
    """A client that is no live worker pushed to a group that steps in Sync."""


class CheckpointError(ParamServeError):
    """A checkpoint was not written, or there is none that can be read; the one before is as it
    was."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing, damaged or of another kind; the text names file and
    part."""


class CheckpointFolderTaken(CheckpointError):
    """A living run writes its checkpoints to this folder; the text names it."""


def _tree(root: type[ParamServeError]) -> dict[str, type[ParamServeError]]:
    tree = {root.__name__: root}
    for child in root.__subclasses__():
        tree.update(_tree(child))
    return tree


KINDS = _tree(ParamServeError)
"""Errors by name: what a server may send, and all that a client will build from a name."""


def section(kind: type[ParamServeError]) -> str:
    """The anchor in the reference of an error; of a class that is not ours, its nearest base's."""
    ours = next(each for each in kind.__mro__ if KINDS.get(each.__name__) is each)
    return f"ps{'' if ours is ParamServeError else 'errors'}{ours.__name__}".lower()


def applied_of(text: str) -> Applied:
    """A word of `Applied` that came from another process; what is none of them is "unknown"."""
    return "yes" if text == "yes" else "no" if text == "no" else "unknown"


def rebuild(kind: str, failed: str, applied: str, fix: str) -> ParamServeError:
    """Make the error that another process named; an unknown name becomes a `ProtocolError`."""
    return KINDS.get(kind, ProtocolError)(failed, applied=applied_of(applied), fix=fix)


def did_you_mean(name: str, names: Collection[str]) -> str:
    """The end of an error about a name that is unknown: the known one that it resembles most, if
    one does; or nothing."""
    near = get_close_matches(name, names, n=1)
    return f": did you mean {near[0]}?" if near else ""


def shown(text: str) -> str:
    """A text, such as the URL of a folder, without the users and passwords of URLs in it."""

    def without(match: re.Match[str]) -> str:
        protocol, user = match.groups()
        is_account = AZURE.fullmatch(protocol) and ":" not in user
        return match[0] if is_account else f"{protocol}://"

    return USERINFO.sub(without, text)


def warn_user(message: str) -> None:
    """Warn at the user's line: that of the first frame outside of this package and torch; where
    there is none, at the caller's."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level if frame else 2)
