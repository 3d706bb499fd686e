"""The `External` engine: somebody else started the processes, and they offer themselves.

An agent (`paramserve agent HOST:PORT`, started by Slurm, systemd, Kubernetes, a shell) connects to
the driver, proves the token, says what it can run, and waits. The fleet hands each role to a free
agent that can run it. An agent serves one role and ends with it.

No code travels and nothing that came from the socket is unpickled, on either side. What a role is
told is plain data; training functions and rules are those that the agent was started with.

`engine` holds the settings; `fleet` is the roles of one run as other threads see them; `dispatch`
hands them to agents, in one thread with the connections; `matching` decides which agent gets which
role; `protocol` is what both sides tell each other, and `sealing` hides the credentials in it. What
the agent needs of these can be imported from here.
"""

from paramserve.engine.external.engine import External
from paramserve.engine.external.matching import can_run
from paramserve.engine.external.protocol import (
    AGENT,
    Assign,
    Finished,
    Offer,
    Order,
    Report,
    Started,
    as_payload,
)
from paramserve.engine.external.sealing import unseal

__all__ = [
    "External",
    "AGENT",
    "Offer",
    "Assign",
    "Order",
    "Started",
    "Report",
    "Finished",
    "as_payload",
    "can_run",
    "unseal",
]
