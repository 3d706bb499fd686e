"""Ray and RPC as these programs start them: alone on this machine, asking no other host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import ray

from benchmarks.harness import ENVIRONMENTS
from benchmarks.tutorials import EXAMPLES

CPUS = 4
"""That Ray counts: two tasks, or as many actors as a tutorial has, share the cores there are."""


@contextlib.contextmanager
def ray_session() -> Iterator[None]:
    """A Ray of our own; its workers have one thread each and the niceness of this process."""
    # Not under TMPDIR: the path of a Unix socket ends at 107 bytes and Ray's are long.
    with TemporaryDirectory(prefix="pst", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder, "ray_bootstrap_config.yaml").write_text("{}\n")
        os.environ.update(ENVIRONMENTS["benchmarks.rival_ray"])
        os.environ.update(
            HOME=folder,
            OMP_NUM_THREADS="1",
            PYTHONPATH=os.pathsep.join(filter(None, (str(EXAMPLES), os.getenv("PYTHONPATH")))),
            RAY_worker_niceness=str(os.getpriority(os.PRIO_PROCESS, 0)),
        )
        ray.init(
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=f"{folder}/r",
        )
        try:
            yield
        finally:
            ray.shutdown()


def loopback() -> None:
    """Let RPC use the loopback interface only."""
    os.environ.update(ENVIRONMENTS["benchmarks.rival_rpc"])
