"""An entry whose module finds CUDA initialised by what it imports: it must not be forked then."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paramserve.engine.child import Bootstrap

torch = ModuleType("torch")
vars(torch)["cuda"] = SimpleNamespace(is_initialized=lambda: True)
sys.modules["torch"] = torch


def tell(boot: Bootstrap) -> None:
    boot.report("parent", str(os.getppid()).encode())
