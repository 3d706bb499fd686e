"""A damaged file is refused by its name, and the checkpoint before is used."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np
import pytest
from tests.disk import Disk, Image
from tests.suites import each_case
from tests.unit.checkpoint import sample

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import Manifest, decode, digest, encode, manifest_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.tensors import Tensor, layout, parse
from paramserve.errors import CheckpointDamaged, CheckpointError

DAMAGES = 2_000


@cache
def saved() -> tuple[Image, tuple[Manifest, Manifest, Manifest]]:
    disk = Disk()
    with Folder(disk).claimed("run") as folder:
        first = sample.save(folder, 1)
        second = sample.save(folder, 2)
        third = sample.save(folder, 3, second)
    return disk.now, (third, second, first)


def files(image: Image, number: int = 0, lead: str = "") -> Iterator[tuple[str, int]]:
    """All files below a folder with their numbers."""
    for name, inner in sorted(image.folders[number].items()):
        if inner in image.folders:
            yield from files(image, inner, f"{lead}{name}/")
        else:
            yield lead + name, inner


def needed_by(path: str, manifest: Manifest) -> bool:
    own = path == manifest_path(manifest.number)
    return own or path in {file.path for file in manifest.files}


def load(found: Checkpoint) -> sample.Contents:
    return sample.load(found, shards=1)


def verify(found: Checkpoint) -> None:
    found.verify()


def check_loaded(image: Image, path: str) -> None:
    """With this file damaged, what is loaded is what it was, or this file is named."""
    found, manifest, refused = Folder(Disk(image)).first_valid(load)
    assert all(isinstance(each, CheckpointDamaged) and path in str(each) for each in refused)
    assert manifest is None or found == sample.contents(manifest.cut.step)


def check_verified(image: Image, path: str) -> None:
    """With this file damaged, the newest checkpoint that needs nothing of it is the first good."""
    _, manifests = saved()
    good = next((each for each in manifests if not needed_by(path, each)), None)
    _, manifest, refused = Folder(Disk(image)).first_valid(verify)
    assert manifest == good
    assert all(isinstance(each, CheckpointDamaged) and path in str(each) for each in refused)
    assert len(refused) == (manifests.index(good) if good else len(manifests))


def test_bit_flips_and_cuts_are_refused_by_file() -> None:
    image, (newest, *_) = saved()
    chosen = random.Random(0)
    all_files = [each for each in files(image) if needed_by(each[0], newest)]
    for round_ in range(DAMAGES):
        path, number = all_files[round_ % len(all_files)]
        whole = image.files[number]
        damaged = bytearray(whole)
        kind = chosen.randrange(4)
        at = chosen.randrange(len(whole))
        if kind == 0:
            del damaged[at:]
        elif kind == 1:
            damaged += b"\0"
        else:
            damaged[at] ^= 1 << chosen.randrange(8)
        image.files[number] = damaged
        try:
            (check_verified if round_ % 3 else check_loaded)(image, path)
        finally:
            image.files[number] = whole


def test_missing_file_is_refused_by_name() -> None:
    whole, (third, *_) = saved()
    for file in third.files:
        image = whole.copy()
        *folders, name = file.path.split("/")
        number = 0
        for each in folders:
            number = image.folders[number][each]
        del image.folders[number][name]
        with Checkpoint(Disk(image), third) as found:
            with pytest.raises(CheckpointDamaged, match=f"{file.path}: it is missing"):
                found.check()
            with pytest.raises(CheckpointDamaged, match=file.path):
                found.verify()


def test_manifest_of_a_newer_version_is_refused() -> None:
    image, (third, *_) = saved()
    image = image.copy()
    newer = msgspec.structs.replace(third, format=2)
    image.files[image.folders[0][manifest_path(third.number)]] = bytearray(encode(newer))
    folder = Folder(Disk(image))
    with pytest.raises(
        CheckpointError, match="has format 2, and this version of paramserve reads 1"
    ):
        folder.first_valid(load)
    with pytest.raises(CheckpointError, match="use the version"), folder.claimed("another"):
        pass
    with pytest.raises(CheckpointError, match="use the version"):
        folder.prune(keep=1)


@each_case("path", ["../x", "/etc/x", "a//b", "a/./b", ""])
def test_path_out_of_the_folder_is_refused(path: str) -> None:
    _, (third, *_) = saved()
    file = msgspec.structs.replace(third.files[0], path=path)
    text = encode(msgspec.structs.replace(third, files=(file,)))
    with pytest.raises(CheckpointDamaged, match="leads out of the folder"):
        decode(text, "manifest-3.json", "x")


@each_case(
    ("content", "told"),
    [
        (pickle.dumps({"weights": np.ones(300)}), "looks like a pickle"),
        (b"PK\3\4 torch.save", "looks like a pickle"),
        (b"hello, world", "no safetensors file"),
        ((9).to_bytes(8, "little") + b'{"a": 3}!', "no header of safetensors"),
        (layout([Tensor("a", "float32", (3,))]).header + b"0123", "its tensors end at byte"),
    ],
)
def test_file_of_another_kind_is_refused(content: bytes, told: str) -> None:
    """Even if the manifest has its hash."""
    whole, (_, _, first) = saved()
    image, path = whole.copy(), "step-1/values/model.safetensors"
    number = dict(files(image))[path]
    image.files[number] = bytearray(content)
    file = first.file(path)
    other = msgspec.structs.replace(
        file,
        size=len(content),
        parts=(
            msgspec.structs.replace(file.parts[0], length=len(content), digest=digest(content)),
        ),
    )
    changed = tuple(other if each is file else each for each in first.files)
    with (
        Checkpoint(Disk(image), msgspec.structs.replace(first, files=changed)) as found,
        pytest.raises(CheckpointDamaged, match=told),
    ):
        found.tensors("values/model.safetensors")


def test_pickle_among_what_a_worker_saved_is_refused() -> None:
    whole, (_, _, first) = saved()
    image, path = whole.copy(), "step-1/worker-0.msgpack"
    content = pickle.dumps({"a": (1, 2)})
    image.files[dict(files(image))[path]] = bytearray(content)
    file = first.file(path)
    part = msgspec.structs.replace(file.parts[0], length=len(content), digest=digest(content))
    other = msgspec.structs.replace(file, size=len(content), parts=(part,))
    changed = tuple(other if each is file else each for each in first.files)
    with (
        Checkpoint(Disk(image), msgspec.structs.replace(first, files=changed)) as found,
        pytest.raises(CheckpointDamaged, match=r"worker-0\.msgpack: no data that a worker saved"),
    ):
        found.saved(0)


@each_case(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}',
        b'{"a":{"dtype":"F3","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
        b'{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b"[]",
    ],
)
def test_header_that_does_not_fit_is_refused(header: bytes) -> None:
    whole = len(header).to_bytes(8, "little") + header
    with pytest.raises(ValueError, match=r"tensor|header"):
        parse(whole, len(whole) + 8)
