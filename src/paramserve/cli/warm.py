"""`paramserve warm`: kernels compiled ahead of their first use."""

from __future__ import annotations

import time

import click

from paramserve import kernel_folder
from paramserve.errors import ParamServeError


@click.command()
def warm() -> None:
    """Compile every kernel now: on a new machine, or while an image is built.

    Without it each is compiled, once, where it is first needed. What is compiled is for this
    version and this type of processor: on another one it is compiled again. An image for several
    types sets NUMBA_CPU_NAME=x86-64-v3 and NUMBA_CPU_FEATURES="", here and where it runs.
    """
    from paramserve.compilers import in_words, missing
    from paramserve.compiling import compile_all
    from paramserve.kernel_sets import every

    folder, refused, trusted = kernel_folder.choose()
    count = missing(every())
    if not count:
        click.echo(f"paramserve: every kernel is compiled, in {' or '.join(map(str, trusted))}")
        return
    if folder is None:
        raise ParamServeError(
            f"{in_words(count)} not compiled, as none would be kept: not in "
            + "; not in ".join(refused),
            fix=f"set {kernel_folder.VARIABLE} to a folder that only this user can write to",
        )
    began = time.monotonic()
    count = compile_all()
    took_s = time.monotonic() - began
    click.echo(f"paramserve: {in_words(count)} compiled in {took_s:.0f} s, kept in {folder}")
