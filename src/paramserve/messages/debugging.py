"""What `paramserve debug` and `doctor` ask of a server or the coordinator."""

from __future__ import annotations

from msgspec import Struct


class AskDebug(Struct, frozen=True, array_like=True, tag="ask-debug"):
    """A process is to say what it is; with `whole`, also how it was configured, what it has logged
    in the last minutes, and what its threads do."""

    call: int
    whole: bool = True


class DebugReport(Struct, frozen=True, array_like=True, tag="debug-report"):
    """The answer. Tokens, keys and passwords are in none of it.

    `role`: "coordinator" or "server". `number`: the server's shard; -1: none. `time_s`: since the
    epoch, on its clock. `config`: as JSON. `record`: lines of JSON, the oldest first. `servers`: of
    the coordinator, the addresses of each shard's server; none where it has not come, or is lost.
    """

    call: int
    role: str
    number: int
    pid: int
    host: str
    time_s: float
    versions: dict[str, str]
    servers: tuple[tuple[str, ...], ...] = ()
    config: str = ""
    record: tuple[str, ...] = ()
    stacks: str = ""
