"""`run` and `start`: a training function on workers, its parameters on servers, a result.

`starting` checks what it is given, with `arguments`, and makes a plan of it; `running` is what it
returns. `roster` decides what the ends and reports of processes mean, from the `entries` of what is
known of each. `plan` says which processes there are, `processes` starts and ends them, `scaling`
changes their number, `attempt` is one start of all of them, `supervisor` the one thread that
watches them, `overview` its line to the coordinator. `reading` reads values from outside, `result`
is what is left; `packing` carries the function.
"""

from paramserve.launch.reading import Snapshot
from paramserve.launch.result import Result
from paramserve.launch.running import Job
from paramserve.launch.starting import run, start

__all__ = ["Job", "Result", "Snapshot", "run", "start"]
