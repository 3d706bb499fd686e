"""What `paramserve serve` writes to standard error: plain lines, or JSON for log collectors."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import click

from paramserve.cli.statuses import FAILED, TIMED_OUT, status_of
from paramserve.errors import ParamServeError, RunTimeout
from paramserve.logs import JSONFormatter, event

PLAIN = "%(asctime)s %(name)s: %(message)s"
logger = logging.getLogger("paramserve")


def begin(form: str) -> None:
    """Log from now on, as "plain" lines or as "json": paramserve from INFO on, all else from
    WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter("server") if form == "json" else logging.Formatter(PLAIN))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger.setLevel(logging.INFO)
    if form == "json":
        logging.captureWarnings(True)
        threading.excepthook = _thread_failed


@contextmanager
def log_errors(form: str) -> Iterator[None]:
    """In the form "json", an error that ends the command is a line of the log, too.

    Raises:
        click.exceptions.Exit: in place of such an error, and in both forms with `TIMED_OUT` in
            place of `RunTimeout`.
    """
    try:
        yield
    except RunTimeout as error:
        if form == "json":
            logger.error("%s", error, extra=event("timed-out"))
        else:
            click.echo(f"paramserve: {type(error).__name__}: {error}", err=True)
        raise click.exceptions.Exit(TIMED_OUT) from error
    except (ParamServeError, OSError, ValueError, TypeError) as error:
        if form != "json":
            raise
        extra = event("failed", error=type(error).__name__)
        logger.error("%s", error, extra=extra)
        raise click.exceptions.Exit(status_of(error)) from error
    except Exception as error:
        if form != "json":
            raise
        extra = event("failed", error=type(error).__name__)
        logger.exception("%s", error, extra=extra)
        raise click.exceptions.Exit(FAILED) from error


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    kind, error, where = args.exc_type, args.exc_value, args.exc_traceback
    if error is None or issubclass(kind, SystemExit):
        return
    exc_info: tuple[type[BaseException], BaseException, TracebackType | None] = (kind, error, where)
    name = args.thread.name if args.thread is not None else "of no name"
    logger.error("thread %s failed", name, exc_info=exc_info, extra=event("bug"))
    sys.stderr.flush()
