"""Contestants that leave a process behind, raise, or tell how they are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def leaves_a_process(load: object, scratch: Path) -> dict[str, float]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return {"pid": float(child.pid)}


def raises(load: object, scratch: Path) -> dict[str, float]:
    raise RuntimeError("this contestant cannot")


def tells_settings(load: object, scratch: Path) -> dict[str, float]:
    return {
        "threads": float(os.environ["OMP_NUM_THREADS"]),
        "niceness": float(os.getpriority(os.PRIO_PROCESS, 0)),
    }
