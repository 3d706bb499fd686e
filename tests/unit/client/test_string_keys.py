"""Keys of strings: the published hash, of every kind of column, and what is refused by position."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.needs import needs
from tests.suites import each_case

import paramserve as ps
from paramserve.client.names import as_keys

PUBLISHED = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "as": 0x1C330FB2D66BE179,
    "asd": 0x631C37CE72A97393,
    "asdf": 0x415872F599CEA71E,
    "Call me Ishmael. Some years ago--never mind how long precisely-": 0x02A2E85470D6FD96,
}
"""XXH64 with seed 0. Source: xxhash_test.go of github.com/cespare/xxhash."""
NAMES = ["anna", "bo", "", "Zoë", "日本", "😀" * 40, "x" * 31, "y" * 32, "z" * 1000]
PRIMES = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
MASK = (1 << 64) - 1


def left(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & MASK


def xxh64(data: bytes, seed: int = 0) -> int:
    """The specification, again."""
    one, two, three, four, five = PRIMES

    def in_round(acc: int, lane: int) -> int:
        return left((acc + lane * two) & MASK, 31) * one & MASK

    rest = data
    if len(data) >= 32:
        accs = [seed + one + two, seed + two, seed, seed - one]
        while len(rest) >= 32:
            lanes = [int.from_bytes(rest[i : i + 8], "little") for i in (0, 8, 16, 24)]
            accs = [in_round(acc & MASK, lane) for acc, lane in zip(accs, lanes, strict=True)]
            rest = rest[32:]
        h = sum(left(acc, bits) for acc, bits in zip(accs, (1, 7, 12, 18), strict=True)) & MASK
        for acc in accs:
            h = ((h ^ in_round(0, acc)) * one + four) & MASK
    else:
        h = (seed + five) & MASK
    h = (h + len(data)) & MASK
    while len(rest) >= 8:
        h = (left(h ^ in_round(0, int.from_bytes(rest[:8], "little")), 27) * one + four) & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        lane = int.from_bytes(rest[:4], "little") * one & MASK
        h = (left(h ^ lane, 23) * two + three) & MASK
        rest = rest[4:]
    for byte in rest:
        h = left(h ^ (byte * five & MASK), 11) * one & MASK
    h = (h ^ (h >> 33)) * two & MASK
    h = (h ^ (h >> 29)) * three & MASK
    return h ^ (h >> 32)


def signed(digest: int) -> int:
    return digest - (1 << 64) if digest >> 63 else digest


def expected(texts: list[str], seed: int = 0) -> list[int]:
    return [signed(xxh64(text.encode(), seed)) for text in texts]


# --- which hash ----------------------------------------------------------------------------------


def test_keys_are_the_published_digests() -> None:
    keys = ps.keys_of([*PUBLISHED])
    assert keys.dtype == np.int64
    assert keys.view(np.uint64).tolist() == [*PUBLISHED.values()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=80), max_size=6))
@example(NAMES)
def test_keys_follow_the_specification_however_strings_are_kept(texts: list[str]) -> None:
    wanted = expected(texts)
    assert ps.keys_of(texts).tolist() == wanted
    assert ps.keys_of(np.array(texts, object)).tolist() == wanted
    assert ps.keys_of([text.encode() for text in texts]).tolist() == wanted
    if not any(text.endswith("\0") for text in texts):  # numpy cuts them off
        assert ps.keys_of(np.array(texts, np.str_)).tolist() == wanted
        assert ps.keys_of(np.array([text.encode() for text in texts], "S")).tolist() == wanted


def test_keys_of_a_field_are_seeded_by_its_name() -> None:
    users, films = ps.keys_of(NAMES, field="user"), ps.keys_of(NAMES, field="film")
    assert users.tolist() == expected(NAMES, xxh64(b"user"))
    assert not set(users) & {*films, *ps.keys_of(NAMES)}


def test_keys_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = "import paramserve as ps; print(ps.keys_of(['anna', 'Zoë']).tolist())"
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-X", "utf8", "-c", code],
            env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert told.strip() == str(expected(["anna", "Zoë"]))


# --- what columns --------------------------------------------------------------------------------


def columns() -> dict[str, Any]:
    """The same strings as each library keeps them."""
    pa, pd = needs("pyarrow"), needs("pandas")
    text = pa.array(NAMES)
    pieces = pa.chunked_array([text[:4], text[4:4], text[4:]])
    return {
        "tuple": tuple(NAMES),
        "U": np.array(NAMES),
        "big-endian": np.array(NAMES).astype(">U1000"),
        "strided": np.array([name for name in NAMES for _ in "ab"])[::2],
        "StringDType": np.array(NAMES, np.dtypes.StringDType()),
        "series": pd.Series(NAMES),
        "object series": pd.Series(NAMES, dtype=object),
        "index": pd.Index(NAMES),
        "categorical": pd.Series(NAMES, dtype="category"),
        "arrow": text,
        "slice": pa.array(["before", *NAMES, "behind"])[1:-1],
        "large": text.cast(pa.large_string()),
        "view": text.cast(pa.string_view()),
        "binary": text.cast(pa.binary()),
        "dictionary": text.dictionary_encode(),
        "chunked": pieces,
        "mixed": [NAMES[0].encode(), *NAMES[1:]],
    }


def test_every_kind_of_column_has_the_same_keys() -> None:
    wanted = expected(NAMES)
    for kind, column in columns().items():
        assert ps.keys_of(column).tolist() == wanted, kind
        assert as_keys(column, "users")[0].tolist() == wanted, kind


@each_case("empty", [[], np.array([], "U4"), np.array([], object)])
def test_no_strings_have_no_keys(empty: Any) -> None:
    assert ps.keys_of(empty).shape == (0,)
    assert as_keys(empty, "users")[0].shape == (0,)


def test_keys_have_the_shape_of_the_strings() -> None:
    pair = [["a", "b", "c"], ["d", "e", "a"]]
    assert ps.keys_of(pair).shape == ps.keys_of(np.array(pair)).shape == (2, 3)
    assert ps.keys_of("anna").shape == ()
    assert int(ps.keys_of("anna")) == expected(["anna"])[0]


def test_many_strings_keep_their_order() -> None:
    many = [f"user_{number}" for number in range(150_000)]
    keys = ps.keys_of(many)
    assert len(set(keys.tolist())) == len(many)
    assert keys[[0, 65_535, 65_536, 149_999]].tolist() == expected(
        [many[i] for i in (0, 65_535, 65_536, 149_999)]
    )
    assert np.array_equal(keys, ps.keys_of(np.array(many)))


# --- what is refused -----------------------------------------------------------------------------


@each_case(
    ("missing", "shown"), [(None, "None"), (float("nan"), "nan"), (np.float64("nan"), "nan")]
)
def test_missing_id_is_refused_with_its_position(missing: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"position 2 is .*{shown}.*missing id has no key"):
        ps.keys_of(["a", "b", missing, None])
    with pytest.raises(TypeError, match=r"keys of table 'users': position \[1, 0\] is"):
        as_keys([["a"], [missing]], "users")


def test_missing_id_far_behind_is_refused_with_its_position() -> None:
    many: list[Any] = ["x"] * 70_000
    many[69_999] = None
    with pytest.raises(TypeError, match="position 69999 is None"):
        ps.keys_of(many)


def test_missing_id_of_a_column_is_refused_with_its_position() -> None:
    pa, pd = needs("pyarrow"), needs("pandas")
    names = ["a", "b", None, "d"]
    for column in (
        pd.Series(names),
        pd.Series(names, dtype="string"),
        pd.Series(names, dtype="category"),
        pa.array(names),
        pa.chunked_array([names[:2], names[2:]]),
        pa.array(names).dictionary_encode(),
    ):
        with pytest.raises(TypeError, match=r"position 2 is .*missing id"):
            ps.keys_of(column)
        with pytest.raises(TypeError, match=r"position 2 is .*missing id"):
            as_keys(column, "users")


@each_case(
    ("wrong", "text"),
    [
        ([1, 2], "position 0 has the type int"),
        (["a", 1], "position 1 has the type int"),
        (np.array([1, 2]), "are int64"),
        ([1.5], "position 0 has the type float"),
        ([["a"], ["b", "c"]], "position 0 has the type list"),
    ],
)
def test_what_is_no_string_is_refused(wrong: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text + r".*astype\(str\)"):
        ps.keys_of(wrong)


@each_case("column", [np.array([1, 2], object), [1, 2]], ids=["object", "list"])
def test_integers_in_an_object_column_are_told_to_be_integers_first(column: Any) -> None:
    with pytest.raises(TypeError, match=r"To fix: Integers that .*astype\(np\.int64\)"):
        ps.keys_of(column)
    with pytest.raises(TypeError, match=r"To fix: ps\.keys_of takes str"):
        ps.keys_of(["a", 1])


def test_string_without_utf8_is_refused_with_its_position() -> None:
    for column in (["a", "b\udc80"], np.array(["a", "b\udc80"])):
        with pytest.raises(ValueError, match=r"position 1 is 'b\\udc80', which has no UTF-8"):
            ps.keys_of(column)


def test_field_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="field must be a str"):
        ps.keys_of(["a"], field=3)  # type: ignore[arg-type]  # the point of the test


# --- keys of tables ------------------------------------------------------------------------------


def test_table_refuses_other_types_and_names_keys_of() -> None:
    with pytest.raises(TypeError, match=r"'users' have to be integers or strings.*ps\.keys_of"):
        as_keys([1.0, np.nan], "users")
    with pytest.raises(
        TypeError, match=r"'users': position 0 is 1180591620717411303424, more than"
    ):
        as_keys([2**70], "users")
    with pytest.raises(TypeError, match=r"'users'.*position 1 has the type int"):
        as_keys(["a", 1], "users")
    with pytest.raises(TypeError, match=r"'users'.*position 0 has the type int"):
        as_keys([1, "a"], "users")


def test_hashes_above_the_largest_key_are_told_to_be_viewed_with_a_sign() -> None:
    hashes = np.array([1, 2**63, 2**64 - 1], np.uint64)
    with pytest.raises(ValueError, match=r"above 2\*\*63 - 1.*\.view\(np\.int64\)"):
        as_keys(hashes, "users")
    assert as_keys(hashes.view(np.int64), "users")[0].tolist() == [1, -(2**63), -1]


def test_pandas_columns_of_integers_stay_keys() -> None:
    pd = needs("pandas")
    for column in (pd.Series([3, 4]), pd.Series([3, 4], dtype="category")):
        assert as_keys(column, "users")[0].tolist() == [3, 4]
