"""Showing a run while it goes on: as a table or as lines.

On a terminal and in a notebook what is shown is redrawn in place; elsewhere (a file, a CI log) a
line is added at each interval, and those about workers and checkpoints at the end. The last state
stays.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any, Literal, Protocol, get_args

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from paramserve.errors import ParamServeError, did_you_mean
from paramserve.observe.progress import INDENT, Progress, fold
from paramserve.observe.status import RunStatus
from paramserve.observe.table import LiveTable

Show = Literal["table", "line", "none"]
SHOWS: tuple[str, ...] = get_args(Show)
NOTEBOOK_SIZE = 100, 40
"""Columns and lines of a table in a notebook's cell."""


class Watched(Protocol):
    """What has a status, for instance a `paramserve.Job`."""

    def status(self) -> RunStatus: ...


class View(Protocol):
    """Where and how a run is shown."""

    def show(self, status: RunStatus, last: bool) -> None:
        """Show where the run stands.

        Args:
            last: nothing else will come.
        """
        ...


def _lines(progress: Progress, status: RunStatus) -> list[str]:
    more = progress.by_worker(status), progress.checkpoints(status)
    return [progress.line(status), *(INDENT + each for each in more if each)]


class OnTerminal:
    """Redrawn in place; what the program prints meanwhile stands above it."""

    def __init__(self, console: Console, stack: ExitStack, draw: Callable[..., Any]) -> None:
        # Standard output may be a file, while this is on the terminal.
        beside = sys.stdout is not None and sys.stdout.isatty()
        live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=beside,
            vertical_overflow="visible",
        )
        self._live = stack.enter_context(live)
        self._console = console
        self._draw = draw

    def show(self, status: RunStatus, last: bool) -> None:
        page = self._draw(status, self._console.width, self._console.height)
        self._live.update(page, refresh=True)


class InFile:
    """A line at each interval, and the others at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()

    def show(self, status: RunStatus, last: bool) -> None:
        lines = _lines(self._progress, status)
        text = Text("\n".join(lines if last else lines[:1]))
        self._console.print(text, soft_wrap=True)


class InNotebook:
    """One output of the cell, which is replaced."""

    def __init__(self, draw: Callable[..., RenderableType]) -> None:
        self._output: Any = None
        self._draw = draw

    def show(self, status: RunStatus, last: bool) -> None:
        width, height = NOTEBOOK_SIZE
        page = Console(file=io.StringIO(), width=width, height=height)
        page.print(self._draw(status, width, height))
        assert isinstance(page.file, io.StringIO)
        output = {"text/plain": page.file.getvalue().rstrip("\n")}
        if self._output is None:
            display = import_module("IPython.display").display
            self._output = display(output, raw=True, display_id=True)
        else:
            self._output.update(output, raw=True)


class _AsLines:
    """Draws a line, and others about workers and checkpoints."""

    def __init__(self) -> None:
        self._progress = Progress()

    def draw(self, status: RunStatus, width: int, height: int) -> RenderableType:
        folded = (part for line in _lines(self._progress, status) for part in fold(line, width))
        return Text("\n".join(folded), no_wrap=True, overflow="ellipsis")


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def checked(show: Any) -> Show:
    """How a run is shown, as its `show=` says: None: a table on a terminal and in a notebook, and
    elsewhere nothing.

    Raises:
        ValueError: there is no such way.
    """
    if show is None:
        is_seen = in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
        return "table" if is_seen else "none"
    if show not in SHOWS:
        suggestion = did_you_mean(show, SHOWS) if isinstance(show, str) else ""
        raise ValueError(f'show is "table", "line", "none" or None, not {show!r}{suggestion}')
    choice: Show = show
    return choice


@contextmanager
def watch(
    watched: Watched,
    *,
    every_s: float = 1.0,
    console: Console | None = None,
    show: Show = "table",
) -> Iterator[None]:
    """Show how far a run is, for the length of the `with` block.

    Example:
        with observe.watch(job):
            result = job.wait()

    Args:
        watched: a job, or a handle of a cluster.
        every_s: how often.
        console: where to; standard error if None, so that a program's own output stays clean, and
            in a notebook the cell.
        show: "table": a bar with the time left, a row for each worker (steps and steps a second of
            it, the last loss or other value that it logged, staleness, the part of its time that it
            waits for servers, memory) and for each server (bytes of values and of tables, pushes a
            second, requests that wait, memory). "line": one line about the run, and others about
            staleness and checkpoints. Elsewhere than on a terminal and in a notebook both are a new
            line each time. "none": nothing.
    Raises:
        ValueError: `show` is something else.
    """
    if checked(show) == "none":
        yield
        return
    over = threading.Event()
    failed: list[bool] = []

    def follow() -> None:
        while True:
            ended = over.wait(every_s)
            if failed:
                return
            # One that is not told, as while a coordinator does not answer, may be told next time.
            with suppress(ParamServeError):
                view.show(watched.status(), ended)
            if ended:
                return

    with ExitStack() as stack:
        view = _view(console, stack, show)
        thread = threading.Thread(target=follow, name="paramserve-progress", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            failed.append(True)  # what went wrong is told elsewhere, and last
            raise
        finally:
            over.set()
            thread.join()


def _view(console: Console | None, stack: ExitStack, show: Show) -> View:
    drawing = LiveTable() if show == "table" else _AsLines()
    if console is None and in_notebook():
        return InNotebook(drawing.draw)
    terminal = console if console is not None else Console(stderr=True)
    return OnTerminal(terminal, stack, drawing.draw) if terminal.is_terminal else InFile(terminal)
