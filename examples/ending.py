"""How the program of an example ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from rich.console import Console
from rich.markup import escape

import paramserve as ps

Arguments = list[str] | None


def exit_code(main: Callable[[Arguments], None]) -> Callable[..., int]:
    """Have `main` return what the program exits with: 0, or 1 with the error of a run that failed,
    or 130 after Ctrl-C. Other exceptions pass through."""

    @wraps(main)
    def ended(arguments: Arguments = None) -> int:
        try:
            main(arguments)
        except ps.ParamServeError as error:
            Console().print(f"[red]{escape(str(error))}[/]")
            return 1
        except KeyboardInterrupt:  # the job has said how far it got
            return 130
        return 0

    return ended
