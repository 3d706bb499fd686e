"""A worker of a served cluster that is lost begins again where the cluster comes back."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import paramserve as ps
from paramserve.errors import ConnectTimeout, CoordinatorGone, ServerGone
from paramserve.launch import working
from paramserve.launch.connect import ADDRESS
from paramserve.launch.life import SAME_MAX


class Lost(SimpleNamespace):
    """A worker whose cluster has these clocks."""

    rank = 1
    clock = 0
    closed = False

    def __enter__(self) -> Lost:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


class Clusters:
    """Those that answer at an address, one after the other; the last one again and again.

    Args:
        those: a clock, or why none can be joined.
    """

    def __init__(self, *those: int | Exception) -> None:
        self.those = list(those)
        self.asked: list[dict[str, Any]] = []
        self.joined: list[Lost] = []

    def connect(self, address: str, **options: Any) -> Lost:
        self.asked.append({"address": address, **options})
        found = self.those.pop(0) if len(self.those) > 1 else self.those[0]
        if isinstance(found, Exception):
            raise found
        client = SimpleNamespace(
            steps=SimpleNamespace(clocks={"model": found}), connection=SimpleNamespace(keeps=True)
        )
        self.joined.append(Lost(client=client))
        return self.joined[-1]


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Clusters:
    found = Clusters(0)
    monkeypatch.setattr(working, "connect", found.connect)
    monkeypatch.setattr(working, "RETRY_S", 0.0)
    return found


def gone(*_: Any) -> Any:
    raise ServerGone("server 1 does not answer", fix="wait")


def test_same_checkpoint_is_gone_on_from_so_often(clusters: Clusters) -> None:
    with pytest.raises(ServerGone) as error:
        ps.work(gone, "x:1", rank=1)
    assert error.value.__notes__ == [
        f"it went back to the same checkpoint {SAME_MAX} times in a row"
    ]
    assert len(clusters.joined) == SAME_MAX + 1
    assert all(worker.closed for worker in clusters.joined)


def test_progress_counts_anew(clusters: Clusters) -> None:
    clusters.those = [0, 0, 0, 5, 5]
    with pytest.raises(ServerGone):
        ps.work(gone, "x:1", rank=1)
    assert len(clusters.joined) == 3 + SAME_MAX + 1


def test_cluster_on_its_way_is_asked_again(
    clusters: Clusters, capfd: pytest.CaptureFixture[str]
) -> None:
    gone_now = ServerGone("ends", fix="")
    clusters.those = [
        0,
        CoordinatorGone("ends", fix=""),
        ConnectTimeout("none", fix=""),
        ConnectTimeout("none", fix=""),
        gone_now,
        3,
    ]
    seen = []

    def train(worker: Any, more: int, *, last: str) -> str:
        seen.append((worker.client.steps.clocks["model"], more, last, random.random()))
        return gone() if len(seen) == 1 else "done"

    found = ps.work(train, "x:1", rank=1, args=(7,), kwargs={"last": "z"}, timeout_s=9.0)
    assert found == "done"
    assert [each[:3] for each in seen] == [(0, 7, "z"), (3, 7, "z")]
    assert seen[0][3] == seen[1][3], "seeded before each call"
    assert clusters.asked[0]["timeout_s"] == 9.0
    assert [each["timeout_s"] for each in clusters.asked[1:]] == [working.ATTEMPT_S] * 5
    assert capfd.readouterr().err.count("rank 1 still waits for the cluster: none") == 1


def test_other_errors_end_it(clusters: Clusters) -> None:
    def fails(worker: Any) -> None:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        ps.work(fails, "x:1", rank=1)
    clusters.those = [0, PermissionError("of the token")]
    with pytest.raises(PermissionError):
        ps.work(gone, "x:1", rank=1)


def test_place_of_the_environment(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((ADDRESS, "x:1"), ("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert ps.work(lambda worker: worker.rank, seed=3) == 1
    (asked,) = clusters.asked
    assert (asked["address"], asked["rank"], asked["workers"], asked["seed"]) == ("x:1", 1, 4, 3)
