"""`run` and `start`: a training function on workers, its parameters on servers, a result.

`starting` checks what it is given, with `arguments`, and makes a plan of it; `running` is what it
returns. `life` decides who is missing, what is restarted, which checkpoint is next and why it ends:
`roster` is its part that judges the ends and reports of processes, from the `entries` of what is
known of each. `supervisor` does that in one thread: `plan` says which processes there are,
`processes` starts and ends them, `scaling` changes their number, `attempt` is one start of all of
them, `overview` the line to their coordinator. `reading` reads values from outside, `result`
is what is left; `packing` carries the function.
"""

from paramserve.launch.reading import Snapshot
from paramserve.launch.result import Result
from paramserve.launch.running import Job
from paramserve.launch.starting import run, start

__all__ = ["Job", "Result", "Snapshot", "run", "start"]
