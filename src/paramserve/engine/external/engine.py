"""The settings of `External`, checked, and what an engine does with them. See `base.Engine`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paramserve.config import TLS
from paramserve.engine.external.fleet import ExternalFleet
from paramserve.errors import ParamServeError
from paramserve.transport.token_file import credentials_of

PORT_MAX: Final = 65535


@dataclass(frozen=True)
class External:
    """Run in processes that somebody else has started with `paramserve agent`.

    Each process of a run takes one agent, which ends with it: `workers + servers + 1` are needed,
    and one more for each restart and each worker that `Job.scale` adds. What starts them (Slurm,
    systemd, a loop in a shell) may start them again for the next run, and before the driver: they
    wait for it.

    The training function is not sent. It has to be a function of a module that the agents can
    import, without `args` and `kwargs`, and agents name it: `--train module:function`. Rules
    likewise: `--rules module:Class`. What the function returns comes back as plain data: None,
    numbers, text, bytes, and lists and dicts of these.

    Example:
        ps.run(training.train, workers=2, engine=ps.External("10.0.0.1:7000", token_file="token"))

    Args:
        bind: `host:port` where agents connect; port 0 takes any free one, which the log tells. All
            processes reach each other by the addresses from which they reach this one, so name
            the address of a network that they share, not 127.0.0.1 if one is on another host.
        token_file: the token, the same on all hosts; see `paramserve token`.
        tls: certificates for all connections of the run on this host; agents name their own files.
            None: no TLS; then whoever can read the network reads gradients and values, not the
            token.
        wait_s: how long a process may wait for an agent.
    """

    bind: str = "127.0.0.1:0"
    token_file: str | os.PathLike[str] | None = None
    tls: TLS | None = None
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.bind.rpartition(":") if isinstance(self.bind, str) else ("", "", "")
        if not host or not port.isdecimal() or int(port) > PORT_MAX:
            raise ValueError(f"bind must be 'HOST:PORT', not {self.bind!r}")
        if self.token_file is None:
            raise ValueError(
                "External needs token_file=...: agents prove that they may join; make one with: "
                "paramserve token FILE"
            )
        if not isinstance(self.token_file, str | os.PathLike):
            raise TypeError(f"token_file must be a path, not {self.token_file!r}")
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise TypeError(f"tls must be ps.TLS(...), not {self.tls!r}")
        if isinstance(self.wait_s, bool) or not isinstance(self.wait_s, int | float):
            raise TypeError(f"wait_s must be a number, not {self.wait_s!r}")
        if not 0 < self.wait_s < math.inf:
            raise ValueError(f"wait_s must be above 0 and finite, not {self.wait_s}")

    def open(self, roles: Sequence[str] = ()) -> ExternalFleet:
        """Listen for agents. The caller closes the fleet.

        Raises:
            ParamServeError: the token file cannot be used, or the port is taken.
        """
        credentials = credentials_of(self.token_file, self.tls)
        path = os.fspath(self.token_file or "")
        return ExternalFleet(self.bind, path, credentials, self.wait_s, len(roles))

    def publish(self, name: str, data: bytes) -> Callable[[], None]:
        """Refused: the hosts of agents share no place for names. Raises `ParamServeError`."""
        raise ParamServeError(
            f"the name {name!r} was not published: with ps.External() there is no place for names "
            "that all hosts can see",
            fix="give others cluster.handle(), or run `paramserve serve` and give them its address",
        )

    def find(self, name: str) -> bytes | None:
        """Refused, as `publish`: an answer would be a guess. Raises `ParamServeError`."""
        raise ParamServeError(
            f"the name {name!r} was not looked up: ps.External() has no place for names",
            fix="use a cluster's handle, or ps.connect(address, ...) for `paramserve serve`",
        )
