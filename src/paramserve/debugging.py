"""What a process tells of itself to `paramserve debug` and `doctor`: versions, settings, its recent
log, what its threads do. Never a token, a key or a password."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback

import msgspec

from paramserve import recent
from paramserve.config import CoordinatorConfig, ServerConfig
from paramserve.logs import without_secrets
from paramserve.messages import AskDebug, DebugReport


def report(
    ask: AskDebug,
    config: CoordinatorConfig | ServerConfig,
    servers: tuple[tuple[str, ...], ...] = (),
) -> DebugReport:
    """The answer of the process with this configuration.

    Args:
        servers: as of `DebugReport`.
    """
    from paramserve import __version__
    from paramserve.reporters import versions  # with what it needs: not for each process's start

    number = config.shard if isinstance(config, ServerConfig) else -1
    about = DebugReport(
        ask.call,
        "server" if isinstance(config, ServerConfig) else "coordinator",
        number,
        os.getpid(),
        platform.node(),
        time.time(),
        {"paramserve": __version__, **versions()},
        servers,
    )
    if not ask.whole:
        return about
    return msgspec.structs.replace(
        about,
        config=config_text(config),
        record=tuple(without_secrets(line) for line in recent.lines()),
        stacks=without_secrets(stacks()),
    )


def config_text(config: CoordinatorConfig | ServerConfig) -> str:
    """A configuration as JSON, without what tells the cluster from others and without secrets."""
    fields = msgspec.to_builtins(config)
    del fields["cluster"]
    return without_secrets(msgspec.json.format(msgspec.json.encode(fields).decode()))


def stacks() -> str:
    """Stack of each thread of this process."""
    names = {each.ident: each.name for each in threading.enumerate()}
    parts = []
    for number, frame in sys._current_frames().items():
        lines = traceback.format_stack(frame)
        parts.append(f"thread {names.get(number, number)}:\n{''.join(lines)}")
    return "\n".join(parts)
