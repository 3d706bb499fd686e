"""Ways into a cluster, without one: what is asked for, with which secrets, and who is refused."""

from __future__ import annotations

import logging
import pickle
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.suites import each_case

import paramserve as ps
from paramserve.config import NO_CREDENTIALS, Credentials
from paramserve.errors import ConnectTimeout, CoordinatorGone, ParamServeError, UnknownName
from paramserve.launch import connect as joining
from paramserve.launch.connect import Handle, attach, connect, from_environment
from paramserve.messages import Member, Status
from paramserve.transport.auth import credentials_of

SECRET = b"0123456789abcdef-the-secret"
ADDRESSES = ("unix:@somewhere", "tcp:10.0.0.1:5555")


class FakeClient:
    """Remembers how it was made and closed."""

    def __init__(self, rank: int, workers: int = 4) -> None:
        self.rank = rank
        self.connection = SimpleNamespace(workers=workers, incarnation=1, restarts=False)
        self.steps = SimpleNamespace(overtaken={})
        self.closed: list[bool] = []

    def close(self, *, leave: bool = True) -> None:
        self.closed.append(leave)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Dialled:
    """Stands in for `Connection.join`: remembers what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, Credentials, dict[str, Any]]] = []
        self._error = error

    def join(self, addresses: Any, credentials: Credentials, **options: Any) -> FakeClient:
        self.calls.append((addresses, credentials, options))
        if self._error is not None:
            raise self._error
        return FakeClient(options["rank"])


def not_there(text: str) -> ConnectTimeout:
    """As raised where no process listens."""
    error = ConnectTimeout(text, fix="x")
    error.__cause__ = ConnectionRefusedError()
    return error


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Dialled:
    found = Dialled()
    monkeypatch.setattr(joining, "Connection", found)
    monkeypatch.setattr(joining, "Client", lambda connection: connection)
    return found


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_bytes(SECRET + b"\n")
    return path


def handle(connect: Any = None) -> Handle:
    return Handle.of(
        ADDRESSES,
        Credentials(SECRET, ps.TLS("cert", "key", "ca")),
        seed=7,
        limits=ps.Limits(clients_max=3),
        deadlines=ps.Deadlines(request_s=9.0),
        connect=connect,
    )


# --- handles -------------------------------------------------------------------------------------


def test_handle_pickled_is_the_same_with_its_secret() -> None:
    copy = pickle.loads(pickle.dumps(handle()))
    assert copy.addresses == ADDRESSES
    assert copy.encode() == handle().encode()
    assert SECRET in copy.encode()


def test_handle_pickled_dials_what_it_was_made_of(dialled: Dialled) -> None:
    pickle.loads(pickle.dumps(handle())).connect()
    addresses, credentials, options = dialled.calls[0]
    assert (addresses, options["rank"]) == (ADDRESSES, -1)
    assert credentials == Credentials(SECRET, ps.TLS("cert", "key", "ca"))
    assert (options["limits"].clients_max, options["deadlines"].request_s) == (3, 9.0)


def test_handle_shows_its_secret_nowhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "Connection", Dialled(not_there("no process answered")))
    found = handle()
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("paramserve").warning("%s %r %s", found, found, [found])
        with pytest.raises(CoordinatorGone) as raised:
            found.connect()
    shown = [repr(found), str(found), f"{found}", repr(vars(found)), caplog.text]
    shown += traceback.format_exception(raised.value)
    for text in shown:
        assert SECRET.decode() not in text
    assert repr(found) == "Handle('unix:@somewhere')"


def test_handle_without_an_answer_says_that_the_cluster_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "Connection", Dialled(not_there("no process answered at x")))
    with pytest.raises(CoordinatorGone, match=r"no process answered at x.*lives as long as its"):
        handle().connect()


def test_handle_of_a_cluster_that_is_not_complete_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    incomplete = ConnectTimeout("1 of 2 servers have registered", fix="x")
    monkeypatch.setattr(joining, "Connection", Dialled(incomplete))
    with pytest.raises(ConnectTimeout, match=r"1 of 2 servers.* To fix: start the missing servers"):
        handle().connect()


def test_handle_connect_with_a_rank_gives_a_worker_with_the_seed(dialled: Dialled) -> None:
    worker = handle().connect(2, workers=4)
    assert isinstance(worker, ps.Worker)
    assert (worker.rank, worker.workers, worker.seed) == (2, 4, 7)
    assert dialled.calls[0][2]["workers"] == 4


def test_handle_rank_0_is_a_worker_too(dialled: Dialled) -> None:
    assert isinstance(handle().connect(rank=0), ps.Worker)


def test_handle_connects_as_its_owner_says() -> None:
    asked: list[tuple[int, int]] = []

    def own(rank: int, workers: int) -> Any:
        asked.append((rank, workers))
        return FakeClient(rank)

    found = handle(own)
    found.connect()
    found.connect(3)
    found.connect(3, workers=4)
    assert asked == [(-1, 0), (3, 0), (3, 4)]


def test_handle_rank_that_is_none_of_the_workers_is_refused(dialled: Dialled) -> None:
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        handle().connect(2, workers=2)
    assert dialled.calls == []


# --- by name -------------------------------------------------------------------------------------


class KnowsOne:
    """An engine with one named cluster."""

    def find(self, name: str) -> bytes | None:
        return handle().encode() if name == "known" else None

    def __repr__(self) -> str:
        return "KnowsOne()"


def test_attach_gives_the_handle_that_was_published() -> None:
    engine: Any = KnowsOne()
    assert attach("known", engine=engine).encode() == handle().encode()


def test_attach_unknown_name_says_where_it_looked() -> None:
    engine: Any = KnowsOne()
    with pytest.raises(UnknownName, match=r"no cluster named 'other' was found by KnowsOne\(\)"):
        attach("other", engine=engine)


# --- by address ----------------------------------------------------------------------------------


def test_connect_dials_with_the_tokens_file(dialled: Dialled, token_file: Path) -> None:
    tls = ps.TLS("cert", "key", "ca")
    worker = connect("ps0:5555", rank=3, workers=4, token_file=token_file, tls=tls, seed=5)
    addresses, credentials, options = dialled.calls[0]
    assert (addresses, credentials) == ("tcp:ps0:5555", Credentials(SECRET, tls))
    assert (options["rank"], options["workers"]) == (3, 4)
    assert worker.seed == 5


def test_connect_unix_needs_no_token(dialled: Dialled) -> None:
    connect("unix:/run/ps.sock", rank=0)
    assert dialled.calls[0][:2] == ("unix:/run/ps.sock", NO_CREDENTIALS)


@each_case(
    ("options", "text"),
    [
        ({}, "needs its rank"),
        ({"rank": -1}, "at least 0"),
        ({"rank": True}, "rank must be an int"),
        ({"rank": 1.0}, "rank must be an int"),
        ({"rank": "1"}, "rank must be an int"),
        ({"rank": 4, "workers": 4}, "ranks are 0 to 3"),
        ({"rank": 0, "workers": 0}, "rank 0 of 0 workers"),
    ],
)
def test_connect_wrong_rank_is_refused_before_dialling(
    dialled: Dialled, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        connect("ps0:5555", **options)
    assert dialled.calls == []


# --- from the environment ------------------------------------------------------------------------


def environment(**changes: str | None) -> dict[str, str]:
    found: dict[str, str | None] = {
        "PARAMSERVE_ADDRESS": "ps0:5555",
        "RANK": "1",
        "WORLD_SIZE": "4",
        **changes,
    }
    return {name: value for name, value in found.items() if value is not None}


def test_from_environment_takes_what_torchrun_sets(dialled: Dialled, token_file: Path) -> None:
    worker = from_environment(environment(PARAMSERVE_TOKEN_FILE=str(token_file)), seed=3)
    addresses, credentials, options = dialled.calls[0]
    assert (addresses, credentials.token, credentials.tls) == ("tcp:ps0:5555", SECRET, None)
    assert (options["rank"], worker.workers, worker.seed) == (1, 4, 3)


def test_from_environment_takes_all_three_tls_files(dialled: Dialled, token_file: Path) -> None:
    files = {
        "PARAMSERVE_TLS_CERTIFICATE": "c",
        "PARAMSERVE_TLS_KEY": "k",
        "PARAMSERVE_TLS_AUTHORITY": "a",
    }
    from_environment(environment(PARAMSERVE_TOKEN_FILE=str(token_file), **files))
    assert dialled.calls[0][1].tls == ps.TLS("c", "k", "a")


@each_case(
    ("changes", "text"),
    [
        ({"PARAMSERVE_ADDRESS": None}, "has no PARAMSERVE_ADDRESS"),
        ({"PARAMSERVE_ADDRESS": ""}, "has no PARAMSERVE_ADDRESS"),
        ({"RANK": None}, "has no RANK"),
        ({"WORLD_SIZE": None}, "has no WORLD_SIZE"),
        ({"RANK": "one"}, "RANK must be a number of at least 0, not 'one'"),
        ({"RANK": "-1"}, "RANK must be a number of at least 0, not '-1'"),
        ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE must be a number"),
        ({"RANK": "4"}, "rank 4 of 4 workers"),
        ({"PARAMSERVE_TLS_KEY": "key.pem"}, "TLS needs all of PARAMSERVE_TLS_CERTIFICATE"),
    ],
)
def test_from_environment_wrong_variable_is_named(
    dialled: Dialled, changes: dict[str, str | None], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        from_environment(environment(**changes))
    assert dialled.calls == []


def test_from_environment_reads_the_process_environment(
    dialled: Dialled, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(PARAMSERVE_ADDRESS="unix:/run/x").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PARAMSERVE_TOKEN_FILE", raising=False)
    from_environment()
    assert dialled.calls[0][0] == "unix:/run/x"


# --- token files ---------------------------------------------------------------------------------


def test_token_file_is_read_without_its_line_end(token_file: Path) -> None:
    assert credentials_of(token_file) == Credentials(SECRET)
    assert credentials_of(str(token_file)) == Credentials(SECRET)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644])
def test_token_file_that_others_may_use_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(ParamServeError, match=f"mode {mode:o}.*chmod 600 {token_file}"):
        credentials_of(token_file)


def test_token_file_of_a_group_is_taken(token_file: Path) -> None:
    token_file.chmod(0o440)  # as a secret that Kubernetes mounts
    assert credentials_of(token_file).token == SECRET


def test_token_file_missing_is_made_by_the_first_server_and_copied_by_others(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "none"
    with pytest.raises(ParamServeError, match=r"cannot be read.*paramserve token FILE"):
        ps.serve("127.0.0.1:0", token_file=missing)
    for joins in (
        lambda: ps.serve("127.0.0.1:0", token_file=missing, join="127.0.0.1:9"),
        lambda: ps.connect("127.0.0.1:9", rank=0, token_file=missing),
    ):
        with pytest.raises(ParamServeError, match=r"copy the one .* first server") as told:
            joins()
        assert "paramserve token" not in str(told.value)


def test_token_file_too_short_is_refused_without_showing_it(token_file: Path) -> None:
    token_file.write_bytes(b"hunter2\n")
    with pytest.raises(ParamServeError, match="has 7 characters, it needs 16") as raised:
        credentials_of(token_file)
    assert "hunter2" not in str(raised.value)


def test_no_token_file_is_no_credentials() -> None:
    assert credentials_of(None) == NO_CREDENTIALS
    tls = ps.TLS("c", "k", "a")
    assert credentials_of(None, tls) == Credentials(tls=tls)


def test_snapshots_go_on_when_a_worker_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    come: list[Any] = [None, "last of the first", None, "of its successor", None]
    states = ["left", "live", "live", "left"]

    def told(handle: Handle) -> Status:
        return Status(0, (Member(0, 1, 1, states.pop(0)),), (), (), (), 0)

    class FakeWatching:
        def __init__(self, *given: object) -> None: ...

        def take(self, connect: Any) -> Any:
            return come.pop(0) if come else None

        def unknown(self) -> None: ...

    monkeypatch.setattr(joining, "Watching", FakeWatching)
    monkeypatch.setattr(joining, "LOOK_S", 0.0)
    monkeypatch.setattr(Handle, "_status", told)
    handle = Handle.of(
        ADDRESSES, NO_CREDENTIALS, seed=0, limits=ps.Limits(), deadlines=ps.Deadlines()
    )
    assert list(handle.snapshots()) == ["last of the first", "of its successor"]
    assert states == []


def test_handle_of_a_served_cluster_that_has_ended_does_not_advise_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "STATUS_S", 0.1)
    at = (f"unix:{tmp_path}/nothing",)
    options: dict[str, Any] = {"seed": 0, "limits": ps.Limits(), "deadlines": ps.Deadlines()}
    for served, fix in ((True, "paramserve serve"), (False, r"job\.wait")):
        handle = Handle.of(at, NO_CREDENTIALS, served=served, **options)
        with pytest.raises(CoordinatorGone, match=rf"has ended, or cannot be .*{fix}") as told:
            pickle.loads(pickle.dumps(handle)).status()
        assert ("job.wait" in str(told.value)) is not served
