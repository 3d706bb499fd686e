"""Events in the log: what each one is called, and a formatter that writes one JSON object a line;
and lines on standard error for the person who waits.

All of paramserve logs to the logger "paramserve". A line about an event carries the event's name
and what it is about (`event`), beside the message for people.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from paramserve.errors import shown

EVENTS: Final[Mapping[str, str]] = {
    # a cluster and its servers
    "serving": "a server is ready at `address`",
    "metrics": "the first server serves metrics at `address`, a URL",
    "servers-complete": "all servers have registered: workers may come",
    "servers-missing": "servers have not registered for a while: `shards`",
    "server-joined": "the server of a shard has registered, at `address`",
    "server-lost": "a server has ended or is lost, and its values with it",
    "server-silent": "the coordinator does not answer a server that wants to join, or waits",
    "resumed": "the cluster goes on from `checkpoint`",
    "begun": "the cluster begins anew: its folder has no checkpoint",
    # workers
    "worker-joined": "a worker has come",
    "worker-left": "a worker has left in order",
    "worker-died": "a worker counts as dead, for good unless it comes again",
    "worker-restarting": "a worker counts as dead, and is waited for",
    "worker-retiring": "a worker is asked to end, as the cluster was scaled down",
    "worker-expected": "a rank may come that could not before, as the cluster was scaled up",
    "workers-missing": "with --until-done: workers that have not come or left yet",
    # refusals and connections
    "request-refused": "the coordinator refuses a call with `error`, such as RankTaken",
    "peer-refused": "a peer from `peer` did not prove the token or its certificate",
    "peers-crowded": "unknown peers hold all places for handshakes; the oldest are closed",
    "accept-failed": "the listener at `address` cannot accept, as without free descriptors",
    "client-cut-off": "a client broke the order of its requests",
    "buffer-lost": "a server could not apply gradients that it had collected, of a policy before",
    "host-lost": "a host has been silent for too long: a connection to it is ended",
    "server-unreachable": "a server cannot reach another one of its cluster",
    "reconnected": "a broken connection to the coordinator stands again",
    "no-tls": "a port is open beyond this machine without TLS",
    # what runs
    "policy-changed": "a group has another consistency policy from `clock` on",
    "checkpoint-written": "a checkpoint is whole: `checkpoint`, `bytes`, `seconds`, `pause_s`",
    "checkpoint-failed": "a checkpoint was not written; training goes on",
    "checkpoint-left-out": "a checkpoint does not wait for `left_out`, which stood still in a push",
    "residuals-lost": "a cluster goes on without what codecs had left out of gradients",
    "paused": "a process did not run for `seconds`; that time counts for no deadline",
    "credentials-renewed": "a renewed token or certificate is in use from now on",
    "credentials-refused": "a renewed file cannot be used; what was read before stays in use",
    "reporter-dropped": "a reporter failed, and is told nothing more",
    # ends
    "done": "all workers have come and left, as --until-done asks",
    "stopping": "the server was told to end (SIGTERM or Ctrl-C)",
    "timed-out": "--timeout is over before all workers have come and left",
    "failed": "the process ends with `error`",
    "ended": "the server serves no more",
    "bug": "an error of paramserve itself; please report it",
    "log": "a line about none of these, or of another library",
}
"""The name of each event, and what it says. `docs/reference.md` has them as a table."""

_FIELDS: Final = "paramserve_event"
"""Attribute of a log record that holds its event."""


_SECRETS_MAX: Final = 192
"""Texts of tokens that are hidden, three of each: of the last 64 of this process at least."""
_secrets: tuple[str, ...] = ()
"""The newest last. Replaced and never changed: other threads go through it."""


def hide(secret: bytes) -> None:
    """Let no line of JSON and no debug report of this process show this token."""
    global _secrets
    text = secret.decode("utf-8", "backslashreplace")
    if text not in _secrets:
        forms = {each: None for each in (text, secret.hex(), repr(secret)[2:-1]) if each}
        _secrets = (*_secrets, *forms)[-_SECRETS_MAX:]


def without_secrets(text: str) -> str:
    """A text without the tokens of this process, and without users and passwords in URLs."""
    for secret in _secrets:
        text = text.replace(secret, "[secret]")
    return shown(text)


def event(name: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """The `extra=` of a log call about an event.

    Args:
        name: one of `EVENTS`.
        fields: what it is about, as `rank`, `client`, `server` (a shard's number) or `address`;
            values that JSON has.
    Raises:
        ValueError: there is no such event.
    """
    if name not in EVENTS:
        raise ValueError(f"{name!r} is no event of paramserve.logs.EVENTS")
    return {_FIELDS: {"event": name, **fields}}


def event_of(record: logging.LogRecord) -> dict[str, Any]:
    """The event of a log record, with its fields; of a line about none, the event "log"."""
    fields: dict[str, Any] = getattr(record, _FIELDS, {"event": "log"})
    return fields


class JSONFormatter(logging.Formatter):
    """Writes each log record as one line of JSON, for programs that collect logs.

    An object has `time` (UTC, ISO 8601), `level`, `role`, `event`, what the event is about (`rank`,
    `client`, `server`, `address` and others), `message`, and with an exception its `traceback`:

        from paramserve.logs import JSONFormatter

        handler = logging.StreamHandler()
        handler.setFormatter(JSONFormatter(role="worker", rank=3))
        logging.getLogger("paramserve").addHandler(handler)

    `paramserve serve --log json` does so by itself.

    Args:
        role: of this process, where the event names none; such as "server" or "worker".
        fields: stand in each line.
    """

    def __init__(self, role: str, **fields: Any) -> None:
        super().__init__()
        self._always = {"role": role, **fields}

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        return json.dumps(self.as_fields(record), default=str)

    def as_fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """What stands in a record's line."""
        fields = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            **self._always,
            **event_of(record),
            "message": record.getMessage(),
        }
        if record.name != "paramserve":
            fields["logger"] = record.name
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return {
            name: without_secrets(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }


def _utc(seconds: float) -> str:
    """Time in UTC, such as 2026-11-24T00:46:48.123Z."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def write_line(words: str) -> None:
    """Write a line on standard error, in one piece: a line of progress may be there."""
    if sys.stderr is not None:  # else print would take standard output
        with contextlib.suppress(OSError, ValueError):  # the terminal is lost, the run is not
            print(f"paramserve: {words}\n", end="", file=sys.stderr, flush=True)
