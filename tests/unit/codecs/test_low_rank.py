"""PowerSGD against projections in float64, torch's hook, and bytes that are no thin matrices."""

from __future__ import annotations

import signal
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.codecs.test_built_in import aligned, decode, encode, there_and_back

from paramserve.codecs import Codec, Int8, PowerSGD, TopK

ROOT = Path(__file__).parents[3]
ABORTS_MAX = 5

SHAPES = [(30, 20), (7,), (4, 3, 5, 5), (2, 2), (), (1, 50), (16, 16)]
"""Matrices, of which one is a convolution's, between what is sent as it is."""
MAX = float(np.finfo(np.float32).max)


def normal(shapes: Any, seed: int = 0) -> Any:
    drawn = np.random.default_rng(seed).normal(size=sum(map(prod, shapes)))
    return drawn.astype(np.float32)


def parts(values: Any, shapes: Any = SHAPES) -> list[Any]:
    ends = np.cumsum([prod(shape) for shape in shapes])[:-1]
    cut = np.split(np.asarray(values, np.float64), ends)
    return [part.reshape(shape) for part, shape in zip(cut, shapes, strict=True)]


def projected(matrix: Any, rank: int, iterations: int, seed: tuple[int, int]) -> Any:
    """Onto what the power iteration spans, by a pseudo-inverse: no orthonormal columns."""
    spans = np.random.default_rng(seed).standard_normal((matrix.shape[1], rank), np.float32)
    for _ in range(iterations - 1):
        spans = matrix.T @ (matrix @ spans)
    spans = matrix @ spans
    return spans @ np.linalg.pinv(spans) @ matrix


@each_case("iterations", [1, 2])
@each_case("rank", [1, 2, 4])
def test_matrices_are_projected_and_all_else_is_exact(rank: int, iterations: int) -> None:
    values, seed = normal(SHAPES), 0x1_0000_0007
    codec = PowerSGD(rank, iterations).bound(SHAPES)
    found = parts(there_and_back(codec, values, seed))
    sent = 0
    for number, (given, got) in enumerate(zip(parts(values), found, strict=True)):
        matrix = given.reshape(given.shape[0], -1) if given.ndim > 1 else given.reshape(1, -1)
        n, m = matrix.shape
        if given.ndim < 2 or (n + m) * min(rank, n, m) >= n * m:
            np.testing.assert_array_equal(got, given)
            sent += n * m
            continue
        wanted = projected(matrix, rank, iterations, (7, number))
        np.testing.assert_allclose(got.reshape(n, m), wanted, atol=2e-5)
        assert np.linalg.norm(got.reshape(n, m) - matrix) > 0.1
        sent += (n + m) * rank
    assert codec.size(values.size) == 4 * sent == encode(codec, values, seed).size


def test_matrix_of_that_rank_is_exact() -> None:
    rng = np.random.default_rng(1)
    matrix = (rng.normal(size=(40, 3)) @ rng.normal(size=(3, 60))).astype(np.float32)
    found = there_and_back(PowerSGD(3).bound([(40, 60)]), matrix.reshape(-1), 5)
    np.testing.assert_allclose(found, matrix.reshape(-1), atol=1e-5)


def test_second_iteration_comes_closer_to_the_best_matrix() -> None:
    values, shape = normal([(50, 80)]), (50, 80)
    left = [
        np.mean(
            [
                np.linalg.norm(there_and_back(PowerSGD(2, k).bound([shape]), values, seed) - values)
                for seed in range(20)
            ]
        )
        for k in (1, 2, 8)
    ]
    best = np.sqrt((np.linalg.svd(values.reshape(shape), compute_uv=False)[2:] ** 2).sum())
    assert left[0] > left[1] > left[2] >= best
    assert left[2] < 1.01 * best


@each_case("size", [0.0, 1e-45, 1e-38, 1e-20, 1e20, 1e38])
def test_extremes_stay_close(size: float) -> None:
    codec = PowerSGD(1).bound([(9, 8)])
    for values in (np.full(72, size, np.float32), np.full(72, -size, np.float32)):
        np.testing.assert_allclose(there_and_back(codec, values, 1), values, rtol=1e-5, atol=1e-44)
    alone = np.zeros(72, np.float32)
    alone[13] = size
    np.testing.assert_allclose(there_and_back(codec, alone, 1), alone, rtol=1e-5, atol=1e-44)


def test_largest_values_stay_finite() -> None:
    for values in (np.full(600, MAX, np.float32), np.sign(normal([(30, 20)])) * np.float32(MAX)):
        for rank in (1, 4):
            there_and_back(PowerSGD(rank).bound([(30, 20)]), values, 2)


def test_equal_values_and_seeds_give_equal_bytes() -> None:
    codec, values = PowerSGD(2).bound(SHAPES), normal(SHAPES)
    first = encode(codec, values, 3)
    assert first.tobytes() == encode(codec, values.copy(), 3).tobytes()
    assert first.tobytes() != encode(codec, values, 4).tobytes()


def test_without_shapes_nothing_is_a_matrix() -> None:
    values = normal([(100,)])
    np.testing.assert_array_equal(there_and_back(PowerSGD(1), values), values)
    assert PowerSGD(1).size(100) == 400


def test_bytes_that_are_none_are_refused() -> None:
    codec, values = PowerSGD(2).bound([(30, 20), (5,)]), normal([(30, 20), (5,)])
    data = encode(codec, values, 1)
    longer = aligned(data.size + 8)
    longer[: data.size] = data
    for wrong in (data[:-8], data[:0], longer):
        with pytest.raises(ValueError, match="bytes came where"):
            decode(codec, wrong, 605)
    with pytest.raises(ValueError, match="604 values are not tensors of the shapes"):
        codec.decode(data, np.empty(604, np.float32))
    for place, value, told in (
        (0, np.nan, "NaN or Inf"),
        (70, np.inf, "NaN or Inf"),
        (104, -np.inf, "NaN or Inf"),
        (3, 1.1, "no length of 1"),
        (3, -MAX, "no length of 1"),
    ):
        wrong = aligned(data.size)
        wrong[...] = data
        wrong.view(np.float32)[place] = value
        with pytest.raises(ValueError, match=told):
            codec.decode(wrong, np.empty(605, np.float32))
    data.view(np.float32)[60:100] = MAX
    assert np.isfinite(decode(codec, data, 605)).all()


@each_case("wrong", [0, -1, 1.0, True, "2"])
def test_options_are_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"rank of ps.PowerSGD is an int at least 1"):
        PowerSGD(wrong)
    with pytest.raises(ValueError, match=r"iterations of ps.PowerSGD is an int from 1 to 8"):
        PowerSGD(1, wrong)
    with pytest.raises(ValueError, match=r"iterations of ps.PowerSGD .* not 9"):
        PowerSGD(1, 9)


def test_it_is_in_no_chain() -> None:
    for make in (lambda: PowerSGD(1) | Int8(), lambda: TopK(0.1) | PowerSGD(1)):
        with pytest.raises(TypeError, match="chain"):
            make()


def test_feedback_sends_all_in_the_end() -> None:
    codec: Codec = PowerSGD(1).bound([(20, 30)])
    gradient, left, sent = normal([(20, 30)]), np.zeros(600, np.float32), np.zeros(600)
    for seed in range(400):
        given = gradient + left
        found = there_and_back(codec, given, seed)
        left, sent = given - found, sent + found
    np.testing.assert_allclose(sent + left, 400 * gradient, atol=1e-2)
    assert np.linalg.norm(left) < 0.1 * np.linalg.norm(400 * gradient)


@pytest.mark.parametrize("rank", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_torch_hook_gives_the_same_gradient(rank: int, tmp_path: Path) -> None:
    """In a process of its own: torch's DDP now and then aborts it, from one of its threads."""
    pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    command = [sys.executable, "-m", "tests.unit.codecs.torch_hook", str(rank), str(tmp_path)]
    for _ in range(ABORTS_MAX):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != -signal.SIGABRT:
            break
    assert done.returncode == 0, done.stderr
    if "no gloo" in done.stdout:
        pytest.skip("NOT CHECKED AGAINST TORCH: this torch has no gloo")
    saved = np.load(tmp_path / "found.npz")
    gradient, hooked = saved["gradient"], saved["hooked"]
    found = there_and_back(PowerSGD(rank).bound([(40, 60)]), gradient, 11)
    assert np.linalg.norm(hooked - gradient) > 0.1 * np.linalg.norm(gradient)
    np.testing.assert_allclose(found, hooked, atol=1e-6)
