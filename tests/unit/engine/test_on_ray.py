"""Settings of `OnRay`, and what it says without a usable Ray. Ray is not imported here."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.suites import each_case

from paramserve.engine.base import Role
from paramserve.engine.on_ray import Needs, OnRay, engine, naming, process
from paramserve.engine.on_ray.control import import_ray
from paramserve.engine.on_ray.keeper import Keeper
from paramserve.errors import CannotPlace, ParamServeError


def test_engine_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    engine = OnRay()
    for use in (engine.open, lambda: engine.find("x"), lambda: engine.publish("x", b"")):
        with pytest.raises(ParamServeError, match=r"pip install 'paramserve\[ray\]'"):
            use()


def test_engine_with_an_old_ray_says_which_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("ray")
    old.__version__ = "2.9.3"
    monkeypatch.setitem(sys.modules, "ray", old)
    with pytest.raises(ParamServeError, match=r"needs Ray 2\.\d+ or newer, and this is 2\.9\.3"):
        OnRay().open()


@each_case(
    ("settings", "error", "text"),
    [
        ({"servers": "apart"}, ValueError, "servers must be one of pack, spread, not 'apart'"),
        ({"workers": "pack"}, ValueError, "workers must be one of beside, apart, anywhere"),
        ({"server": {"num_cpus": 1}}, TypeError, r"server must be ps\.Needs"),
        ({"place_s": 0}, ValueError, "place_s must be above 0"),
        ({"place_s": "1"}, TypeError, "place_s must be a number"),
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker must be at least 1, not 0"),
        ({"threads_per_worker": 2.0}, TypeError, "threads_per_worker must be an int, not 2.0"),
        ({"address": "somewhere"}, ValueError, "must be 'auto' or 'host:port'"),
        ({"address": 6379}, TypeError, "address must be a str or None"),
        ({"address": "ray://head:10001"}, ValueError, "ray job submit"),
        (
            {
                "servers": "spread",
                "server": Needs(label_selector={"zone": "a"}),
                "worker": Needs(label_selector={"zone": "b"}),
            },
            ValueError,
            "use workers='apart' or 'anywhere'",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        OnRay(**settings)


class FakeRay(ModuleType):
    """The part of ray that names need: nothing runs, and `get` fails as it is told."""

    __version__ = "2.50.0"

    class exceptions:
        RayError = type("RayError", (Exception,), {})
        RayActorError = type("RayActorError", (RayError,), {})
        GetTimeoutError = type("GetTimeoutError", (RayError,), {})

    def __init__(self) -> None:
        super().__init__("ray")
        self.connected = False
        self.addresses: list[str] = []
        self.waits: list[float | None] = []
        self.killed: list[object] = []
        self.failure: BaseException | None = None

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, address: str, **_: object) -> None:
        self.addresses.append(address)
        raise ConnectionError("Could not find any running Ray instance")

    def shutdown(self) -> None:
        raise AssertionError("the connection is not ours")

    def get(self, _: object, timeout: float | None = None) -> None:
        self.waits.append(timeout)
        if self.failure is not None:
            raise self.failure

    def kill(self, actor: object, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)

    def nodes(self) -> list[object]:
        return []

    def available_resources(self) -> dict[str, float]:
        return {}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


@pytest.mark.parametrize("named", [None, "local"])
def test_find_without_a_ray_starts_none_and_says_so(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(ParamServeError, match="reached at 'auto': Could not find") as caught:
        OnRay().find("x")
    assert ray.addresses == ["auto"]
    assert "new Ray" not in caught.value.fix


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (FakeRay.exceptions.GetTimeoutError(), CannotPlace, "name 'x' within 7 s. It has 0 nodes"),
        (FakeRay.exceptions.RayActorError("gone"), ParamServeError, "has died: gone"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_publish_without_an_answer_in_place_s_leaves_no_actor(
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    error: type[BaseException],
    text: str,
) -> None:
    actor = MagicMock()
    made = MagicMock()
    made.options.return_value.remote.return_value = actor
    monkeypatch.setattr(naming, "remote", lambda *_: made)
    ray.connected, ray.failure = True, failure
    with pytest.raises(error, match=text):
        OnRay(place_s=7).publish("x", b"")
    assert ray.waits == [7]
    assert ray.killed == [actor]


def test_engine_shows_only_what_is_not_the_default() -> None:
    assert repr(OnRay()) == "OnRay()"
    assert repr(OnRay("auto", servers="spread", place_s=3)) == (
        "OnRay('auto', servers='spread', place_s=3)"
    )


def test_secret_travels_in_no_argument_that_goes_to_the_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray keeps arguments of more than 100 KB there."""
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(process, "_create", lambda *_: None)
    monkeypatch.setattr(
        process.RayProcess, "_call", lambda self, *arguments: sent.append(arguments)
    )
    secret = b"opens the ports"
    started = process.RayProcess("worker 0", Needs(), None, 1.0, {})
    started.start(Role("worker 0", "a:b", b"x" * 200_000, secret=secret))
    large = [each for each in sent[-1] if isinstance(each, bytes) and len(each) >= 100_000]
    assert len(large) == 1
    assert secret not in large[0]
    assert secret in sent[-1]


# --- a cluster that is too small -----------------------------------------------------------------


@pytest.mark.parametrize("started_here", [True, False])
@pytest.mark.parametrize("nodes", [1, 2])
def test_run_that_has_no_room_fails_at_once_where_no_node_can_come(
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    started_here: bool,
    nodes: int,
) -> None:
    """Anywhere else nodes may be added, by an autoscaler or by hand: that it waits is said."""
    node = SimpleNamespace(is_head=lambda: started_here)
    ray._private = SimpleNamespace(worker=SimpleNamespace(_global_node=node))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0}, raising=False)
    monkeypatch.setattr(engine, "reserve", reserving)
    driver = classmethod(lambda cls, *_: cls(None, None))
    monkeypatch.setattr(engine.RoomKeeper, "of_this_process", driver)
    ray.connected = True
    expected = CannotPlace if started_here and nodes == 1 else Reserving
    with pytest.raises(expected) as caught:
        OnRay().open(["coordinator", "server 0", "worker 0", "worker 1"])
    told = str(caught.value) if expected is CannotPlace else caplog.text
    assert "needs 3 CPU: 1 server x 1 + 2 workers x 1; the cluster has 2" in told
    assert "ps.Needs(num_cpus=0.65)" in told


class Reserving(Exception):
    """Raised where room would be reserved."""


def reserving(*_: object, **__: object) -> None:
    raise Reserving


def test_ray_that_is_imported_here_first_shows_the_lines_of_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("__version__ = '99.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RAY_DEDUP_LOGS", "1")
    monkeypatch.delenv("RAY_DEDUP_LOGS")
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(sys.modules["ray"], "__version__", "99.0", raising=False)
    import_ray()
    assert "RAY_DEDUP_LOGS" not in os.environ, "the program has imported it, and set it or not"
    monkeypatch.delitem(sys.modules, "ray")
    import_ray()
    assert os.environ["RAY_DEDUP_LOGS"] == "0"


def test_keeper_gives_all_groups_back_and_ends_where_one_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (SimpleNamespace(id=SimpleNamespace(hex=lambda n=n: n)) for n in ("a1", "b2"))
    removed = list[Any]()

    def remove(group: Any) -> None:
        removed.append(group)
        if group is first:
            raise RuntimeError("no such group")

    class Exited(Exception):
        """Ray raises one of its own out of `exit_actor`."""

    ray = ModuleType("ray")
    monkeypatch.setattr(
        ray, "actor", SimpleNamespace(exit_actor=MagicMock(side_effect=Exited)), raising=False
    )
    groups = ModuleType("ray.util.placement_group")
    monkeypatch.setattr(groups, "remove_placement_group", remove, raising=False)
    for name, made in (
        ("ray", ray),
        ("ray.util", ModuleType("ray.util")),
        (groups.__name__, groups),
    ):
        monkeypatch.setitem(sys.modules, name, made)

    async def end() -> None:
        keeper = Keeper()
        for group in (first, second):
            await keeper.keep(group)
        with pytest.raises(Exited):
            await keeper._end()
        await asyncio.wait_for(keeper.live(), 1.0)

    asyncio.run(end())
    assert removed == [first, second]
    assert "cannot remove placement group a1" in caplog.text
