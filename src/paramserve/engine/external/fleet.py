"""The roles of one run in the processes of others, as the threads of the driver see them.

Each call is passed on to the one thread that a fleet has, in which its `dispatch` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from paramserve.config import Credentials
from paramserve.engine.base import Event, Role
from paramserve.engine.external.dispatch import Dispatcher, Request
from paramserve.engine.external.matching import ExternalProcess, command_for
from paramserve.engine.external.protocol import Ending
from paramserve.errors import ParamServeError
from paramserve.transport.tcp import warn_if_open

logger = logging.getLogger("paramserve")

CLOSE_S: Final = 10.0
"""A killed process is gone at once, unless its host is."""


class ExternalFleet:
    """Roles in the processes of others. See `base.Fleet`.

    Attributes:
        address: `host:port` where agents connect.
    """

    shares_host = False
    plain = True

    def __init__(
        self, bind: str, token_file: str, credentials: Credentials, wait_s: float, roles: int
    ) -> None:
        """Listen at `bind` for agents, which read the token in their `token_file`.

        Raises:
            ParamServeError: the port is taken. Nothing is left.
        """
        self.tls = credentials.tls
        self.room_s = wait_s
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._dispatcher = Dispatcher(self._loop, credentials, token_file, wait_s, roles)
        self._thread = threading.Thread(target=self._run, name="paramserve-agents", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._dispatcher.listen(bind), self._loop).result()
        except BaseException:
            self.close()
            raise
        self.address = self._dispatcher.address
        warn_if_open(bind, self.tls)
        logger.info("agents are awaited: %s", command_for(self.address, token_file))

    def launch(self, role: Role) -> ExternalProcess:
        """Hand a role to an agent, now or as soon as there is one; returns at once.

        If none takes it in `wait_s`, the process has failed.

        Raises:
            ParamServeError: it would have to be sent code.
        """
        if role.code and not role.reference:
            raise ParamServeError(
                f"{role.name} cannot run on ps.External(): what it is to run has no name that an "
                "agent could import, and code is not sent",
                fix="use a function (a class of rules) on the top level of a module that agents "
                "can import, not of the script itself, without args= and kwargs=, and start agents "
                "with --train module:function (--rules module:Class)",
            )
        process = ExternalProcess(role, self.order)
        with self._lock:
            if self._closed:
                raise RuntimeError("this fleet is closed")
            self._dispatcher.running.add(process)
            self._loop.call_soon_threadsafe(self._dispatcher.enqueue, process)
        return process

    def make_room(self, roles: Sequence[Role]) -> None:
        """Wait up to `wait_s` for a free agent for each role, and keep them for these.

        Raises:
            CannotPlace: there are not enough. None is kept.
            RuntimeError: the fleet is closed.
        """
        if not roles:
            return
        request = Request(list(roles), Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("this fleet is closed")
            self._loop.call_soon_threadsafe(self._dispatcher.request, request)
        try:
            request.done.result()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._dispatcher.drop, request)
            raise

    def give_back(self, names: Sequence[str]) -> None:
        """Let agents that wait for these roles take others."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._dispatcher.free, tuple(names))

    def order(self, process: ExternalProcess, what: Ending) -> None:
        """Have a process ended. Does nothing if it has ended, or the fleet is closed."""
        if process.exit_status is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._dispatcher.order, process, what)

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call; waits up to `timeout_s` if nothing has."""
        return self._dispatcher.events.take(timeout_s)

    def close(self) -> None:
        """Kill what still runs, wait for its end and hang up on all agents. May be repeated."""
        with self._lock:
            self._closed = True
            running = tuple(self._dispatcher.running)
        for process in running:
            process.kill()
        deadline = time.monotonic() + CLOSE_S
        for process in running:
            process.wait(deadline - time.monotonic())
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._dispatcher.hang_up())
        self._loop.close()
