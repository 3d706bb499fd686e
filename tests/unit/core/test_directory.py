from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from tests.suites import each_case

from paramserve.config import ConsistencySpec, RuleSpec
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import (
    Async,
    BoundedStaleness,
    Buffered,
    DelayCompensated,
    ElasticAverage,
    Inverse,
    LocalSteps,
    Sync,
)
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core import directory as module
from paramserve.core.directory import Directory
from paramserve.core.partition import PIECE_BYTES_MIN
from paramserve.errors import DefineMismatch, ParamServeError
from paramserve.messages import Link, Piece, PlaceBlock, TableSpec

SGD = RuleSpec("SGD", {"lr": 0.1})


def place(*shapes: tuple[int, ...], **changes: Any) -> PlaceBlock:
    pieces = tuple(Piece(f"p{i}", shape) for i, shape in enumerate(shapes))
    call = PlaceBlock(1, "model", "float32", SGD, pieces, True, 5.0)
    return structs.replace(call, **changes)


def test_place_first_one_defines_and_others_wait() -> None:
    directory = Directory(2)
    placed = directory.place(place((3,)), client=1)
    assert placed is not None
    spec, attempt = placed
    assert (spec.block, spec.group, attempt) == (0, 0, 1)
    assert directory.place(place((3,)), client=2) is None
    assert directory.place(place((3,), define=False), client=2) is None
    assert directory.place(place((3,)), client=1) == (spec, 1), "its own call came twice"
    directory.defined(0, 1)
    assert directory.place(place((3,)), client=2) == (spec, 0)
    assert directory.place(place((3,), define=False), client=2) == (spec, 0)


@each_case(
    ("shapes", "told"),
    [
        ([(3, -1)], "negative length"),
        ([(1 << 62,) * 240], "more than 64 dimensions"),
        ([(1,) * 65], "more than 64 dimensions"),
        ([(1, 1 << 63, 5)], f"{5 << 63} elements in one block, allowed are {1 << 48}"),
        ([(1 << 47,), (1 << 47,), (1,)], f"{(1 << 48) + 1} elements"),
    ],
)
def test_shapes_that_no_shard_could_hold_are_refused(
    shapes: list[tuple[int, ...]], told: str
) -> None:
    """Else the cuts could not be encoded in an answer."""
    directory = Directory(2)
    with pytest.raises(ParamServeError, match=told):
        directory.place(place(*shapes), client=1)
    assert directory.place(place((1 << 48,)), client=1) is not None


def test_place_waits_for_a_name_that_no_client_defines() -> None:
    assert Directory(1).place(place((3,), define=False), client=1) is None


def test_definer_gone_next_one_gets_a_higher_attempt() -> None:
    directory = Directory(1)
    directory.place(place((3,)), client=1)
    directory.client_gone(2)
    assert directory.place(place((3,)), client=2) is None
    directory.client_gone(1)
    assert directory.place(place((3,), define=False), client=3) is None
    again = directory.place(place((3,)), client=2)
    assert again is not None
    assert again[1] == 2
    directory.defined(0, 1)
    assert directory.find(None) == (), "the first attempt does not count any more"
    directory.defined(0, 2)
    directory.client_gone(2)
    assert directory.place(place((3,)), client=3) == (again[0], 0)


def test_defined_unknown_block_is_ignored() -> None:
    directory = Directory(1)
    directory.defined(-1, 1)
    directory.defined(0, 1)
    assert directory.find(None) == ()


@each_case(
    ("changes", "what"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"rule": RuleSpec("SGD", {"lr": 0.2})}, "rule"),
        ({"rule": None, "define": False}, "rule"),
        ({"rule": RuleSpec("Adam"), "define": False}, "rule"),
        ({"pieces": (Piece("p0", (4,)), Piece("p1", (2,)))}, "the shapes 'p0' .3., now 'p0' .4."),
        ({"pieces": (Piece("p0", (3,)),)}, r"number of names 2 \('p1' besides these\), now 1 came"),
    ],
)
def test_place_known_name_otherwise_is_a_mismatch(changes: dict[str, Any], what: str) -> None:
    directory = Directory(1)
    directory.place(place((3,), (2,)), client=1)
    with pytest.raises(DefineMismatch, match=what):
        directory.place(place((3,), (2,), **changes), client=1)


def test_place_of_another_model_than_the_checkpoints_tells_every_difference() -> None:
    saved = Directory(1)
    saved.place(place((3,), (2,)), client=1)
    saved.defined(0, 1)
    directory = Directory(2)
    directory.restore(saved.record({0}))
    pieces = Piece("p0", (4,)), Piece("p1", (2,))
    with pytest.raises(DefineMismatch) as raised:
        directory.place(place(pieces=pieces, dtype="float64", rule=RuleSpec("Adam")), client=1)
    told = str(raised.value)
    for part in (
        "is in the checkpoint with the shapes 'p0' [3], now 'p0' [4] came",
        "with dtype float32, now float64 came",
        "with the rule SGD, now Adam came",
        "begin anew without resume=",
    ):
        assert part in told
    assert directory.place(place((3,), (2,)), client=1) is not None


def test_place_names_of_two_blocks_is_a_mismatch() -> None:
    directory = Directory(1)
    directory.place(place((3,)), client=1)
    directory.place(place(pieces=(Piece("q", (1,)),)), client=1)
    with pytest.raises(DefineMismatch):
        directory.place(place(pieces=(Piece("p0", (3,)), Piece("q", (1,)))), client=1)


def test_place_waiting_client_may_bring_other_hyper_parameters() -> None:
    directory = Directory(1)
    directory.place(place((3,)), client=1)
    directory.defined(0, 1)
    other = RuleSpec("SGD", {"lr": 0.2})
    assert directory.place(place((3,), rule=other, define=False), client=2) is not None


def test_same_name_in_two_groups_is_two_blocks() -> None:
    directory = Directory(1)
    first = directory.place(place((3,)), client=1)
    second = directory.place(place((5,), group="other"), client=1)
    assert first is not None
    assert second is not None
    assert (first[0].block, first[0].group, second[0].block, second[0].group) == (0, 0, 1, 1)


def test_small_blocks_go_to_the_lightest_shard_and_large_ones_to_all() -> None:
    directory = Directory(2)
    cuts = []
    for name, size in (("a", 10), ("b", 4), ("c", 4), ("d", PIECE_BYTES_MIN // 2)):
        placed = directory.place(place(pieces=(Piece(name, (size,)),)), client=1)
        assert placed is not None
        cuts.append(placed[0].cuts)
    assert cuts == [
        (0, 10, 10),
        (0, 0, 4),
        (0, 0, 4),
        (0, PIECE_BYTES_MIN // 4, PIECE_BYTES_MIN // 2),
    ]


@each_case(
    "changes",
    [
        {"pieces": ()},
        {"pieces": (Piece("a", (1,)), Piece("a", (2,)))},
        {"dtype": "int64"},
        {"dtype": "object"},
        {"dtype": "complex128", "rule": None},
        {"pieces": (Piece("", (1,)),)},
        {"pieces": (Piece("a\n", (1,)),)},
        {"pieces": (Piece("a" * 513, (1,)),)},
        {"group": "\x7f"},
        {"pieces": (Piece("a", (-1,)),)},
    ],
)
def test_place_what_no_shard_can_hold_is_refused(changes: dict[str, Any]) -> None:
    directory = Directory(1)
    with pytest.raises(ParamServeError, match="define in group"):
        directory.place(place((3,), **changes), client=1)
    assert directory.place(place((3,)), client=1) is not None, "nothing of it is left"


def test_buffers_may_hold_integers() -> None:
    assert Directory(1).place(place((), rule=None, dtype="int64"), client=1) is not None


def test_mismatch_text_is_short_however_large_the_model() -> None:
    directory = Directory(1)
    many = tuple(Piece(f"layer.{i}.weight", (64, 64)) for i in range(500))
    directory.place(place(pieces=many), client=1)
    with pytest.raises(DefineMismatch) as raised:
        directory.place(place(pieces=many[1:]), client=1)
    assert len(str(raised.value)) < 1000
    assert "a block of 500 tensors in group" in str(raised.value)
    assert str(raised.value).count("'layer.") == 1, "what both have is not named"


def test_find_by_names_needs_all_of_them() -> None:
    directory = Directory(1)
    directory.place(place((3,), (2,)), client=1)
    directory.place(place(pieces=(Piece("q", (1,)),)), client=1)
    assert directory.find(("p0",)) is None
    directory.defined(0, 1)
    found = directory.find(("p1", "p0"))
    assert found is not None
    assert [spec.block for spec in found] == [0]
    assert directory.find(("p0", "q")) is None
    directory.defined(1, 1)
    everything = directory.find(None)
    assert everything is not None
    assert [spec.block for spec in everything] == [0, 1]


def test_refused_define_frees_its_names_for_anything_else() -> None:
    directory = Directory(2)
    large = (PIECE_BYTES_MIN,)
    directory.place(place(large), client=1)
    directory.defined(0, -1)
    assert directory.find(None) == ()
    placed = directory.place(place((3,), rule=None), client=2)
    assert placed is not None
    spec, attempt = placed
    assert (spec.block, attempt, spec.cuts) == (1, 1, (0, 3, 3)), "its bytes count no more"
    directory.defined(0, 1)
    directory.defined(1, 1)
    directory.defined(1, -1)
    assert directory.find(None) == (spec,), "what is defined stays defined"
    directory.client_gone(1)
    assert directory.place(place((3,), rule=None), client=3) == (spec, 0)


def test_place_whole_tensors_are_not_cut() -> None:
    placed = Directory(2).place(place((100,), (40_000,), (7,), whole_tensors=True), client=1)
    assert placed is not None
    assert set(placed[0].cuts) <= {0, 100, 40_100, 40_107}


def test_place_waiting_rank_must_have_the_same_fixed_options() -> None:
    """Numbers travel with each push; what a torch class is called does not."""
    directory = Directory(1)
    rule = RuleSpec("torch", {"kind": "Adagrad", "numbers.0": 0.1})
    directory.place(place((3,), rule=rule), client=1)
    faster = RuleSpec("torch", {"kind": "Adagrad", "numbers.0": 0.5})
    assert directory.place(place((3,), rule=faster, define=False), client=2) is None
    other = RuleSpec("torch", {"kind": "RMSprop", "numbers.0": 0.1})
    with pytest.raises(DefineMismatch, match="RMSprop"):
        directory.place(place((3,), rule=other, define=False), client=2)


# --- a group's policy -----------------------------------------------------------------------------

BOUNDED = ConsistencySpec("BoundedStaleness", {"bound": 2})
OTHER = ConsistencySpec("BoundedStaleness", {"bound": 3})


def test_first_block_decides_its_groups_policy() -> None:
    directory = Directory(1)
    placed = [
        directory.place(place((3,), consistency=BOUNDED), client=1),
        directory.place(place(pieces=(Piece("q", (1,)),)), client=1),
        directory.place(place(pieces=(Piece("r", (1,)),), consistency=BOUNDED), client=1),
        directory.place(place((3,), group="other"), client=1),
    ]
    assert [each and each[0].consistency for each in placed] == [BOUNDED, BOUNDED, BOUNDED, None]


@each_case("define", [True, False])
@each_case("pieces", [(Piece("p0", (3,)),), (Piece("q", (1,)),)])
@each_case("first", [BOUNDED, None])
def test_group_with_another_policy_is_a_mismatch(
    first: ConsistencySpec | None, pieces: tuple[Piece, ...], define: bool
) -> None:
    directory = Directory(1)
    directory.place(place((3,), consistency=first), client=1)
    directory.defined(0, 1)
    with pytest.raises(DefineMismatch, match=r"group 'model' is defined with .*bound=3"):
        directory.place(place(pieces=pieces, define=define, consistency=OTHER), client=2)
    assert directory.place(place((3,)), client=2) is not None, "None agrees with anything"


def test_waiting_for_a_group_decides_nothing() -> None:
    directory = Directory(1)
    assert directory.place(place((3,), define=False, consistency=OTHER), client=1) is None
    placed = directory.place(place((3,), consistency=BOUNDED), client=2)
    assert placed is not None
    assert placed[0].consistency == BOUNDED


def test_refused_define_frees_its_groups_policy_if_it_is_alone() -> None:
    directory = Directory(1)
    directory.place(place((3,), consistency=BOUNDED), client=1)
    directory.defined(0, -1)
    directory.place(place((3,), consistency=OTHER), client=1)
    directory.place(place(pieces=(Piece("q", (1,)),)), client=1)
    directory.defined(2, -1)
    with pytest.raises(DefineMismatch, match="bound=3"):
        directory.place(place(pieces=(Piece("q", (1,)),), consistency=BOUNDED), client=1)


def test_further_names_of_tied_tensors_are_kept_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Directory(1)
    placed = directory.place(place((3,), aliases={"head": "p0"}), client=1)
    assert placed is not None
    assert placed[0].aliases == {"head": "p0"}
    directory.defined(0, 1)
    assert directory.place(place((3,), define=False), client=2) == (placed[0], 0)
    with pytest.raises(ParamServeError, match="control characters"):
        directory.place(place((3,), group="other", aliases={"he\nad": "p0"}), client=1)
    monkeypatch.setattr(module, "PIECES_MAX", 2)
    many = {f"a{n}": "p0" for n in range(3)}
    with pytest.raises(ParamServeError, match="3 further names of tied tensors, allowed are 2"):
        directory.place(place((3,), group="other", aliases=many), client=1)


def test_links_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, link = Directory(1), Link("model", "head", {"head.p0": "p0"})
    placed = directory.place(place((3,), links=(link,)), client=1)
    assert placed is not None
    assert placed[0].links == (link,)
    directory.defined(0, 1)
    assert directory.place(place((3,), define=False), client=2) == (placed[0], 0)
    for wrong in (Link("mo\ndel", "head", {}), Link("model", "head", {"a": "\n"})):
        with pytest.raises(ParamServeError, match="control characters"):
            directory.place(place((3,), group="other", links=(wrong,)), client=1)
    monkeypatch.setattr(module, "LINKED_MAX", 2)
    many = Link("model", "head", {f"a{n}": "p0" for n in range(3)})
    with pytest.raises(ParamServeError, match="3 names in other groups, allowed are 2"):
        directory.place(place((3,), group="other", links=(many,)), client=1)


def test_dtypes_of_a_model_are_kept_and_checked() -> None:
    directory, plain = Directory(1), {"rule": None, "dtypes": {"p0": "float16"}}
    placed = directory.place(place((3,), **plain), client=1)
    assert placed is not None
    assert placed[0].dtypes == {"p0": "float16"}
    directory.defined(0, 1)
    assert directory.place(place((3,), rule=None, define=False), client=2) == (placed[0], 0)
    for wrong in (
        {"dtypes": {"p0": "float16"}},
        {**plain, "dtypes": {"p1": "float16"}},
        {**plain, "dtypes": {"p0": "bool"}},
        {**plain, "dtypes": {"p0": "S9"}},
    ):
        with pytest.raises(ParamServeError, match="dtype"):
            directory.place(place((3,), group="other", **wrong), client=1)


@each_case(
    "taken", [{"pieces": (Piece("__metadata__", (3,)),)}, {"aliases": {"__metadata__": "p0"}}]
)
def test_a_name_that_safetensors_keeps_is_refused(taken: dict[str, Any]) -> None:
    with pytest.raises(ParamServeError, match="no tensor can be called '__metadata__'"):
        Directory(1).place(place((3,), **taken), client=1)


def table_of(policy: ConsistencySpec, own: ConsistencySpec | None = None) -> Any:
    """The policy that a table is defined with in a cluster of a policy."""
    directory, spec = Directory(1, policy), TableSpec(3, "float32", 0, {})
    call = place(group="users", dtype="float32", table=spec, consistency=own)
    call = structs.replace(call, pieces=(Piece("users", (3,)),))
    placed = directory.place(call, client=1)
    assert placed is not None
    directory.defined(0, 1)
    again = directory.place(structs.replace(call, consistency=own or policy), client=2)
    assert again is not None
    return placed[0].consistency


@each_case("policy", [Sync(), Async(), BoundedStaleness(2), Buffered(3)])
def test_table_without_a_policy_goes_by_the_clusters(policy: Policy) -> None:
    """None stands for it, as for dense blocks; to name it as well is no other policy."""
    assert table_of(policy_spec(policy)) is None


def test_policy_of_an_older_checkpoint_is_the_one_that_reads_the_same() -> None:
    """Older ones do not say whether a policy is for parameters only."""
    saved = structs.replace(policy_spec(LocalSteps(2)), dense_only=False)
    assert saved == policy_spec(LocalSteps(2))
    assert saved != policy_spec(LocalSteps(3))
    directory = Directory(1, saved)
    directory.place(place((3,), consistency=saved), client=1)
    directory.defined(0, 1)
    again = directory.place(place((3,), consistency=policy_spec(LocalSteps(2))), client=2)
    assert again is not None


@each_case("policy", [DelayCompensated(), LocalSteps(2), ElasticAverage(rho=0.5)])
def test_table_without_a_policy_is_async_where_the_clusters_is_not_for_tables(
    policy: Policy,
) -> None:
    directory, spec = Directory(1, policy_spec(policy)), TableSpec(3, "float32", 0, {})
    call = place(group="users", dtype="float32", table=spec)
    placed = directory.place(structs.replace(call, pieces=(Piece("users", (3,)),)), client=1)
    assert placed is not None
    assert placed[0].consistency == policy_spec(Async())


@each_case(
    ("policy", "follows"),
    [
        (Sync(reduce="sum"), True),
        (Async(), True),
        (BoundedStaleness(2), True),
        (Sync(), False),
        (Async(damping=Inverse(0.1)), False),
        (Buffered(3, damping=None), False),
        (LocalSteps(2), False),
    ],
)
def test_table_that_counts_follows_what_takes_gradients_whole(
    policy: Policy, follows: bool
) -> None:
    directory, spec = Directory(1, policy_spec(policy)), TableSpec(4, "int64", 0, {})
    call = place(group="users", dtype="float32", table=spec)
    placed = directory.place(structs.replace(call, pieces=(Piece("users", (4,)),)), client=1)
    assert placed is not None
    assert placed[0].consistency == (None if follows else policy_spec(Async()))


def test_table_with_a_policy_of_its_own_keeps_it() -> None:
    own = policy_spec(Async())
    assert table_of(policy_spec(Sync()), own) == own
