"""The tutorials' programs in plain Ray and plain torch RPC, as a user of those would write them.

They use the models and data of `examples/`, whose folder is put on the path here.
"""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))
