"""`run` and `start`: a training function on workers, its parameters on servers, a result.

`roster` decides what the ends and reports of processes mean, `plan` says which processes there are,
`supervisor` is the one thread that watches them, `overview` its line to the coordinator, `reading`
reads values from outside, `result` is what is left, `packing` carries the function.
"""

from paramserve.job.reading import Snapshot
from paramserve.job.result import Result
from paramserve.job.running import Job, run, start

__all__ = ["Job", "Result", "Snapshot", "run", "start"]
