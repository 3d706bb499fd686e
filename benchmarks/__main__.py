"""`python -m benchmarks`: every benchmark in one go. See `run_all.py`."""

from __future__ import annotations

import sys

from benchmarks.run_all import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
