"""examples/ray_on_spark.py in Spark's local mode, where there are a JVM and pyspark.

Neither is part of what the suite installs; without them this test is skipped and says so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
HOW = "pip install 'pyspark>=3.3' 'ray[client]', and a JVM in PATH or JAVA_HOME"


def missing() -> list[str]:
    """What this machine lacks to run Ray on Spark."""
    modules = {"pyspark": "pyspark", "ray": "ray", "grpc": "ray[client]"}
    found = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        found.append("a JVM")
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=f"Ray on Spark needs {', '.join(missing())}: {HOW}")
def test_ray_on_spark_local_mode_counts_every_push(tmp_path: Path) -> None:
    (tmp_path / "ray_bootstrap_config.yaml").write_text("{}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "ray_on_spark.py", "--size", "100000", "--steps", "10"],
        cwd=EXAMPLES,
        env={
            **kept,
            "HOME": str(tmp_path),
            # Spark's tasks look for `ray` in PATH, and for python in PYSPARK_PYTHON.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
            "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
        },
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 servers counted 20 pushes of 0.8 MB each" in ended.stdout
