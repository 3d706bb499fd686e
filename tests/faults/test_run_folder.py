"""The folder of a run is removed while it goes on, as cleaners of temporary folders do."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.faults import victims
from tests.faults.leftovers import folders, nothing_left

import paramserve as ps

CONNECTS_WITHIN_S = 60.0


def test_values_survive_the_removal_of_the_runs_folder(pipe: str) -> None:
    with nothing_left():
        job = ps.start(victims.regress, args=(pipe, 10), workers=2, servers=2)
        Path(pipe).read_text()
        deadline = time.monotonic() + CONNECTS_WITHIN_S
        while job._reader is None and time.monotonic() < deadline:
            time.sleep(0.01)
        (folder,) = folders()
        shutil.rmtree(Path(tempfile.gettempdir()) / folder)
        job.stop()
        assert np.abs(job.wait().values["default"]["w"]).sum() > 0
