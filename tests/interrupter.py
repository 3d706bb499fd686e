"""Interrupts at each moment of a call where CPython looks for signals."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import paramserve

SOURCES = str(Path(paramserve.__file__).parent)
CHECKS = frozenset(
    number
    for name, number in dis.opmap.items()
    if name.startswith("CALL") or name == "RESUME" or "JUMP_BACKWARD" in name
)
"""After these instructions CPython looks for signals (ceval.c, `CHECK_EVAL_BREAKER`)."""


class Interrupter:
    """Raises KeyboardInterrupt in a call, in the package's own code on this thread: after the
    n-th instruction where CPython delivers signals.

    Attributes:
        passed: how many such moments there were.
        where: the one that was interrupted; empty: the call ended before.
    """

    def __init__(self, at: int = sys.maxsize) -> None:
        self.passed = 0
        self.where = ""
        self._at = at
        self._code: dict[CodeType, bytes] = {}
        self._due: dict[FrameType, bool] = {}

    def run(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            call()
        except KeyboardInterrupt:
            assert self.where
        finally:
            sys.settrace(before)
            self._due.clear()

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCES) or code.co_name == "__del__":
            return None
        if code not in self._code:
            self._code[code] = code.co_code
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            if self._due.get(frame, False):
                self.passed += 1
                if self.passed == self._at:
                    place = Path(frame.f_code.co_filename).name
                    self.where = f"{place}:{frame.f_lineno} {frame.f_code.co_qualname}"
                    raise KeyboardInterrupt
            self._due[frame] = self._code[frame.f_code][frame.f_lasti] in CHECKS
        elif event == "exception":  # What raises goes to its handler and looks for no signals.
            self._due[frame] = False
        elif event == "return":
            self._due.pop(frame, None)
        return self._step
