"""What `External` promises besides the contract: who may come, what is run, what is told."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from tests.contract.agents import TOKEN, agents, end, environment, start_agent, token_in
from tests.contract.fleets import WAIT_S, until_ended

from paramserve.agent import ENTRIES, _Agent, agent_command, run_agent
from paramserve.config import TLS, Credentials
from paramserve.engine.base import Event, Failure, Reported, Role
from paramserve.engine.child import EXIT_DRIVER_GONE, EXIT_FAILED, EXIT_TERMINATED
from paramserve.engine.external import (
    AGENT,
    Assign,
    External,
    Finished,
    Offer,
    Report,
    Started,
)
from paramserve.engine.external.fleet import ExternalFleet
from paramserve.engine.external.sealing import seal, unseal
from paramserve.engine.placed import SERVER, load
from paramserve.errors import CannotPlace, NotAuthenticated, ParamServeError, ProtocolError
from paramserve.messages import PROTOCOL_VERSION, Hello, decoder, encode
from paramserve.rules.add import Add
from paramserve.transport.framing import PRELUDE
from paramserve.transport.link import Link

HERE = Path(__file__).parent
KEY = Credentials(TOKEN.encode())
SECRET = b"the-cluster-token-0123456789abcd"
TRAIN = "tests.contract.agents:token_in"

Open = Callable[..., ExternalFleet]


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(HERE)
    return token_in(tmp_path)


@pytest.fixture
def open_fleet(token_file: str) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def open_it(bind: str = "127.0.0.1:0", wait_s: float = WAIT_S) -> ExternalFleet:
            engine = External(bind, token_file=token_file, wait_s=wait_s)
            return stack.enter_context(contextlib.closing(engine.open(["coordinator", "server 0"])))

        yield open_it


@pytest.fixture
def fleet(open_fleet: Open) -> ExternalFleet:
    return open_fleet()


def role(entry: str = "pause", payload: bytes = b"", **more: Any) -> Role:
    return Role(f"a {entry}", f"engine_entries:{entry}", payload, SECRET, **more)


def offered(fleet: ExternalFleet, train: str = "", rules: tuple[str, ...] = ()) -> Link:
    """An agent in this process, which does what a test wants."""
    link = Link.connect([f"tcp:{fleet.address}"], Hello(AGENT), credentials=KEY, timeout_s=WAIT_S)
    link.send(encode(Offer(4711, "some-host", train, rules)))
    return link


def given(link: Link, timeout_s: float = WAIT_S) -> Assign | None:
    header = link.receive(timeout_s)
    if header is None:
        return None
    link.skip_payload()
    assign: Assign = decoder(Assign).decode(header)
    return assign


def until_known(fleet: ExternalFleet, count: int) -> None:
    while sum(agent.offer is not None for agent in fleet._dispatcher._agents) < count:
        assert not fleet.events(0.01)


def told(fleet: ExternalFleet, kind: str) -> bytes:
    while True:
        found = fleet.events(WAIT_S)
        assert found, f"no report {kind!r} came"
        for event in found:
            if isinstance(event, Reported) and event.kind == kind:
                return event.body


def failure_in(events: list[Event]) -> Failure:
    [body] = [e.body for e in events if isinstance(e, Reported) and e.kind == "failed"]
    return msgspec.msgpack.decode(body, type=Failure)


def still_works(fleet: ExternalFleet) -> bool:
    """Whether a good agent gets a role now, and its end is told."""
    process = fleet.launch(role())
    link = offered(fleet)
    try:
        assert given(link) is not None
        link.send(encode(Finished(7)))
        return process.wait(WAIT_S) == 7
    finally:
        link.close()


@contextlib.contextmanager
def ends(pid: int) -> Iterator[None]:
    """Check that a process ends during this block or soon after."""
    fd = os.pidfd_open(pid)
    try:
        yield
        assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} still runs"
    finally:
        os.close(fd)


# --- the settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"bind": "7000"}, ValueError, "HOST:PORT"),
        ({"bind": "host:"}, ValueError, "HOST:PORT"),
        ({"bind": "host:65536"}, ValueError, "HOST:PORT"),
        ({"bind": 7000}, ValueError, "HOST:PORT"),
        ({"token_file": None}, ValueError, "paramserve token"),
        ({"token_file": 3}, TypeError, "path"),
        ({"tls": "cert.pem"}, TypeError, r"ps\.TLS"),
        ({"wait_s": 0}, ValueError, "above 0"),
        ({"wait_s": float("inf")}, ValueError, "finite"),
        ({"wait_s": True}, TypeError, "number"),
    ],
)
def test_external_wrong_setting_is_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        External(**{"token_file": "token", **settings})


def test_external_shows_no_token(token_file: str) -> None:
    assert TOKEN not in repr(External(token_file=token_file))


def test_open_token_file_missing_or_open_to_all_is_refused(token_file: str) -> None:
    with pytest.raises(ParamServeError, match="cannot be read"):
        External(token_file=token_file + "s").open()
    os.chmod(token_file, 0o644)
    with pytest.raises(ParamServeError, match="chmod 600"):
        External(token_file=token_file).open()


def test_open_port_that_is_taken_is_refused_and_leaves_nothing(
    fleet: ExternalFleet, open_fleet: Open
) -> None:
    descriptors = sorted(os.listdir("/dev/fd"))
    with pytest.raises(ParamServeError, match="another process listens there"):
        open_fleet(fleet.address)
    assert sorted(os.listdir("/dev/fd")) == descriptors


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "127.0.0.1:0"])
def test_open_beyond_this_machine_without_tls_warns(
    open_fleet: Open, caplog: pytest.LogCaptureFixture, bind: str
) -> None:
    open_fleet(bind)
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert ["beyond this machine at 0.0.0.0:0 without TLS" in each for each in warned] == (
        [True] if bind.startswith("0.") else []
    )


def test_names_are_refused_with_another_way(token_file: str) -> None:
    engine = External(token_file=token_file)
    with pytest.raises(ParamServeError, match=r"cluster\.handle\(\)"):
        engine.publish("x", b"")
    with pytest.raises(ParamServeError, match="paramserve serve"):
        engine.find("x")


# --- who gets what ------------------------------------------------------------------------------


def test_launch_code_without_a_name_is_refused(fleet: ExternalFleet) -> None:
    with pytest.raises(ParamServeError, match="--train module:function"):
        fleet.launch(role(code=b"a pickle"))


def test_code_and_secret_do_not_cross_the_connection(fleet: ExternalFleet) -> None:
    fleet.launch(role(code=b"a pickle", reference=TRAIN))
    link = offered(fleet, TRAIN)
    header = link.receive(WAIT_S)
    assert header is not None
    assert b"a pickle" not in header
    assert SECRET not in header
    link.close()


def test_role_without_an_agent_fails_and_says_how_to_start_one(open_fleet: Open) -> None:
    fleet = open_fleet(wait_s=0.1)
    process = fleet.launch(role(reference=TRAIN))
    seen = until_ended(fleet)
    assert process.exit_status == EXIT_FAILED
    text = failure_in(seen).text
    assert "0 agents were" in text
    assert "2 processes" in text
    assert f"paramserve agent {fleet.address} --token-file" in text
    assert f"--train {TRAIN}" in text


def test_role_that_no_agent_can_run_fails_and_says_both(open_fleet: Open) -> None:
    fleet = open_fleet(wait_s=0.3)
    link = offered(fleet, "other:train", ("own:Rule",))
    fleet.launch(role(reference=TRAIN))
    text = failure_in(until_ended(fleet)).text
    assert TRAIN in text
    assert "1 agent was" in text
    assert "process 4711 on some-host" in text
    assert "--train other:train --rules own:Rule; free" in text
    link.close()


def test_waiting_role_is_ended_by_interrupt_and_kill(fleet: ExternalFleet) -> None:
    first, second = fleet.launch(role()), fleet.launch(role())
    first.interrupt()
    second.kill()
    assert first.wait(WAIT_S) == EXIT_TERMINATED
    assert second.wait(WAIT_S) == -signal.SIGKILL
    assert still_works(fleet)


def test_agent_gets_one_role_only(fleet: ExternalFleet) -> None:
    first, second = fleet.launch(role("first")), fleet.launch(role("second"))
    link = offered(fleet)
    assign = given(link)
    assert assign is not None
    assert assign.name == "a first"
    link.send(encode(Started(12)))
    link.send(encode(Report("up", 0)))
    assert told(fleet, "up") == b""
    assert (first.pid, second.pid) == (12, 0)
    assert given(link, 0) is None
    link.close()
    assert first.wait(WAIT_S) == -signal.SIGKILL
    assert second.exit_status is None


def test_role_goes_to_the_agent_that_can_do_least_besides(fleet: ExternalFleet) -> None:
    links = [offered(fleet, TRAIN), offered(fleet), offered(fleet, "", ("own:Rule",))]
    until_known(fleet, 3)
    fleet.launch(role("plain"))
    fleet.launch(role("train", reference=TRAIN))
    fleet.launch(Role("rules", SERVER, b"", b"", reference="own:Rule"))
    names = [assign.name for link in links if (assign := given(link)) is not None]
    assert names == ["a train", "a plain", "rules"]
    for link in links:
        link.close()


# --- room for more ------------------------------------------------------------------------------


def test_make_room_without_enough_agents_keeps_none_and_says_how_to_start_one(
    open_fleet: Open,
) -> None:
    fleet = open_fleet(wait_s=0.1)
    link = offered(fleet, TRAIN)
    until_known(fleet, 1)
    added = [role("one", reference=TRAIN), role("two", reference=TRAIN)]
    with pytest.raises(CannotPlace, match=r"agents for a one, a two in 0\.1 s") as no:
        fleet.make_room(added)
    assert "4711 on some-host (started with --train" in no.value.failed
    assert no.value.failed.endswith("; free)")
    assert f"paramserve agent {fleet.address} --token-file" in no.value.fix
    fleet.launch(role("other", reference=TRAIN))
    assign = given(link)
    assert assign is not None
    assert assign.name == "a other", "the agent is free for any role"
    link.close()


def test_make_room_waits_for_an_agent_that_comes_and_keeps_it(fleet: ExternalFleet) -> None:
    kept = role("kept", reference=TRAIN)
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(fleet.make_room, [kept])
        first = offered(fleet, TRAIN)
        made.result(WAIT_S)
    second = offered(fleet, TRAIN, ("own:Rule",))
    until_known(fleet, 2)
    fleet.launch(role("other", reference=TRAIN))
    fleet.launch(kept)
    names = [assign.name for link in (first, second) if (assign := given(link)) is not None]
    assert names == ["a kept", "a other"]
    first.close()
    second.close()


def test_give_back_frees_the_agent_for_any_role(fleet: ExternalFleet) -> None:
    link = offered(fleet)
    fleet.make_room([role("kept")])
    waiting = fleet.launch(role("other"))
    assert given(link, 0.05) is None, "it is kept for another role"
    fleet.give_back(["a kept"])
    assign = given(link)
    assert assign is not None
    assert assign.name == waiting.name
    link.close()


def test_close_ends_a_wait_for_room(fleet: ExternalFleet) -> None:
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(fleet.make_room, [role("kept")])
        while not fleet._dispatcher._requests:
            assert not fleet.events(0.01)
        fleet.close()
        with pytest.raises(RuntimeError, match="closed"):
            made.result(WAIT_S)


# --- strangers and nonsense ---------------------------------------------------------------------


def until_hung_up(link: Link) -> None:
    with contextlib.suppress(ConnectionError):
        while link.receive(WAIT_S) is not None:
            pass
        pytest.fail("the connection goes on")


def raw(fleet: ExternalFleet, data: bytes) -> None:
    """Say something else than a handshake, and wait until the other side has had enough."""
    host, _, port = fleet.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(4096)])
def test_stranger_that_sends_garbage_is_refused(fleet: ExternalFleet, data: bytes) -> None:
    raw(fleet, data)
    assert still_works(fleet)


def test_stranger_without_the_token_is_refused(fleet: ExternalFleet) -> None:
    with pytest.raises(NotAuthenticated):
        Link.connect(
            [f"tcp:{fleet.address}"],
            Hello(AGENT),
            credentials=Credentials(b"another token...."),
            timeout_s=WAIT_S,
        )
    assert still_works(fleet)


def test_peer_that_is_no_agent_is_refused(fleet: ExternalFleet) -> None:
    with pytest.raises(ProtocolError, match="waits for agents"):
        Link.connect([f"tcp:{fleet.address}"], Hello("client"), credentials=KEY, timeout_s=WAIT_S)
    assert still_works(fleet)


@pytest.mark.parametrize("header", [b"\xc1", encode(Finished(0)), encode(Started(1)), b""])
def test_agent_that_talks_nonsense_is_cut_off(fleet: ExternalFleet, header: bytes) -> None:
    link = Link.connect([f"tcp:{fleet.address}"], Hello(AGENT), credentials=KEY, timeout_s=WAIT_S)
    link.send(header)
    until_hung_up(link)
    assert still_works(fleet)


def test_agent_of_another_version_is_cut_off_and_its_role_told(fleet: ExternalFleet) -> None:
    process = fleet.launch(role())
    link = offered(fleet)
    assert given(link) is not None
    other = PRELUDE.pack(b"PSRV", PROTOCOL_VERSION + 1, 0, 1, 0) + b"x"
    os.write(link.fileno(), other)
    assert process.wait(WAIT_S) == -signal.SIGKILL
    link.close()
    assert still_works(fleet)


# --- what an agent runs -------------------------------------------------------------------------


def assigned(**changes: Any) -> Assign:
    sealed = seal(TOKEN.encode(), SECRET)
    return msgspec.structs.replace(Assign("w", ENTRIES[2], TRAIN, sealed, {}, 0), **changes)


@pytest.fixture
def agent() -> Iterator[_Agent]:
    with socket.socket() as sock:
        link: Any = SimpleNamespace(fileno=sock.fileno)
        yield _Agent(link, KEY, TRAIN, ["own:Rule"], ENTRIES)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"entry": "os:system"}, NotAuthenticated, "'os:system'"),
        ({"reference": "other:train"}, ParamServeError, f"'other:train'.*'{TRAIN}'"),
        ({"entry": SERVER, "reference": "own:Rule,a:B"}, ParamServeError, r"a:B.*\['own:Rule'\]"),
        ({"environment": {"LD_PRELOAD": "1"}}, NotAuthenticated, "LD_PRELOAD"),
        ({"environment": {"OMP_NUM_THREADS": "1;"}}, NotAuthenticated, "OMP_NUM_THREADS"),
        ({"secret": seal(b"another token....", SECRET)}, NotAuthenticated, "token"),
    ],
)
def test_agent_refuses_what_it_was_not_started_for(
    agent: _Agent, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        agent._role(assigned(**changes), b"")


def test_agent_takes_what_it_was_started_for(agent: _Agent) -> None:
    taken = agent._role(assigned(environment={"OMP_NUM_THREADS": "3"}), b"")
    assert taken.secret == SECRET
    assert taken.environment == {"OMP_NUM_THREADS": "3"}
    assert taken.code == b""
    assert taken.directory == ""


def test_agent_names_its_own_certificates(agent: _Agent) -> None:
    own = TLS("own.pem", "own-key.pem", "ca.pem")
    agent._credentials = Credentials(TOKEN.encode(), own)
    theirs = Credentials(b"cluster", TLS("a", "b", "c"))
    taken = agent._role(assigned(secret=seal(TOKEN.encode(), theirs.encode())), b"")
    assert Credentials.decode(taken.secret) == Credentials(b"cluster", own)


def test_load_gives_rules_to_servers_and_a_function_to_others() -> None:
    assert load(SERVER, "paramserve.rules.add:Add") == (Add,)
    assert load(ENTRIES[2], TRAIN) == (token_in, (), {})
    assert load(ENTRIES[0], "") is None


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 200])
def test_seal_hides_and_unseal_gives_back(size: int) -> None:
    data = os.urandom(size)
    sealed = seal(TOKEN.encode(), data)
    assert unseal(TOKEN.encode(), sealed) == data
    assert size < 16 or data not in sealed
    assert seal(TOKEN.encode(), data) != sealed


@pytest.mark.parametrize("at", [0, 20, 60])
def test_unseal_what_was_changed_is_refused(at: int) -> None:
    sealed = bytearray(seal(TOKEN.encode(), SECRET))
    sealed[at] ^= 1
    with pytest.raises(NotAuthenticated):
        unseal(TOKEN.encode(), bytes(sealed))


@pytest.mark.parametrize("name", ["train", "module:", ":train", "module:a.b", "module:a b"])
def test_run_agent_wrong_function_is_refused(token_file: str, name: str) -> None:
    with pytest.raises(ValueError, match="MODULE:NAME"):
        run_agent("127.0.0.1:1", token_file, name)


def test_agent_command_tls_in_part_is_a_usage_error(token_file: str) -> None:
    command = ["127.0.0.1:1", "--token-file", token_file, "--tls-key", token_file]
    outcome = CliRunner().invoke(agent_command, command)
    assert outcome.exit_code == 2
    assert "--tls-authority" in outcome.output


def test_agent_command_tls_file_that_is_missing_is_a_usage_error(token_file: str) -> None:
    files = [f"--tls-{name}={token_file}s" for name in ("certificate", "key", "authority")]
    command = ["127.0.0.1:1", "--token-file", token_file, "--wait=0.01", *files]
    outcome = CliRunner().invoke(agent_command, command)
    assert outcome.exit_code == 2
    assert "does not exist" in outcome.output


# --- real agents --------------------------------------------------------------------------------


def test_agent_gives_its_role_what_it_was_started_with(
    fleet: ExternalFleet, token_file: str
) -> None:
    entry = "tests.contract.agents:tell_what_it_has"
    fleet.launch(Role("w", entry, b"", SECRET, code=b"no pickle", reference=TRAIN))
    with agents(1, fleet.address, token_file, TRAIN, everything=True):
        seen = until_ended(fleet)
        fleet.close()
    found = {e.kind: e.body for e in seen if isinstance(e, Reported)}
    assert found == {"load": f"{TRAIN} () {{}}".encode(), "host": b"127.0.0.1", "plain": b"True"}


def test_agent_refusal_is_the_roles_failure(fleet: ExternalFleet, token_file: str) -> None:
    fleet.launch(role())
    with agents(1, fleet.address, token_file) as [agent]:
        assert "'engine_entries:pause'" in failure_in(until_ended(fleet)).text
    assert agent.returncode == EXIT_FAILED


@pytest.mark.parametrize(("how", "status"), [(None, 7), (signal.SIGSEGV, 128 + signal.SIGSEGV)])
def test_agent_exits_with_its_roles_status(
    fleet: ExternalFleet, token_file: str, how: signal.Signals | None, status: int
) -> None:
    process = fleet.launch(role("exit_with", b"7") if how is None else role())
    with agents(1, fleet.address, token_file, everything=True) as [agent]:
        if how is not None:
            told(fleet, "up")
            os.kill(process.pid, how)
        until_ended(fleet)
        assert process.exit_status == (7 if how is None else -how)
    assert agent.returncode == status


def test_agent_that_is_killed_takes_its_role_along(fleet: ExternalFleet, token_file: str) -> None:
    process = fleet.launch(role())
    with agents(1, fleet.address, token_file, everything=True) as [agent]:
        told(fleet, "up")
        with ends(process.pid):
            agent.kill()
            until_ended(fleet)
    assert process.exit_status == -signal.SIGKILL
    assert still_works(fleet)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_agent_that_is_stopped_ends_its_role_in_order(
    fleet: ExternalFleet, token_file: str, how: signal.Signals
) -> None:
    fleet.launch(role())
    with agents(1, fleet.address, token_file, everything=True) as [agent]:
        told(fleet, "up")
        agent.send_signal(how)
        seen = until_ended(fleet)
    assert [e.kind for e in seen if isinstance(e, Reported)] == ["cleaned"]
    assert agent.returncode == EXIT_TERMINATED


def test_agent_without_a_role_ends_with_the_fleet(fleet: ExternalFleet, token_file: str) -> None:
    with agents(1, fleet.address, token_file) as [agent]:
        until_known(fleet, 1)
        fleet.close()
    assert agent.returncode == 0


def test_agent_waits_for_its_driver(open_fleet: Open, token_file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    agent = start_agent(address, token_file, everything=True)
    try:
        fleet = open_fleet(address)
        fleet.launch(role("exit_with", b"3"))
        until_ended(fleet)
        assert agent.wait(WAIT_S) == 3
    finally:
        end([agent])


def test_agent_command_runs_from_the_present_folder(
    fleet: ExternalFleet, token_file: str, tmp_path: Path
) -> None:
    fleet.launch(role())
    script = "from paramserve.agent import agent_command; agent_command()"
    told_on = tmp_path / "stderr"
    with told_on.open("wb") as stderr:
        agent = subprocess.Popen(
            [sys.executable, "-c", script, fleet.address, "--token-file", token_file],
            env=environment(),
            stderr=stderr,
        )
    assert "no role of paramserve" in failure_in(until_ended(fleet)).text
    assert agent.wait(WAIT_S) == EXIT_FAILED
    assert told_on.read_text() == ""


DRIVER = """
import sys
sys.path[:] = {path!r}
from paramserve.engine.base import Reported, Role
from paramserve.engine.external import External

fleet = External(token_file={token_file!r}).open()
print(fleet.address, flush=True)
fleet.launch(Role("b", "engine_entries:spin", {marker!r}, b""))
fleet.launch(Role("c", "engine_entries:start_another", b"wait", b""))
seen = []
while len(seen) < 2:
    seen += [e for e in fleet.events(20.0) if isinstance(e, Reported)]
pids = [e.process.pid for e in seen] + [int(e.body) for e in seen if e.kind == "started"]
print(*pids, flush=True)
sys.stdin.read()
"""


def test_drivers_death_ends_agents_and_all_they_started(token_file: str, tmp_path: Path) -> None:
    marker = tmp_path / "callback-ran"
    script = DRIVER.format(path=sys.path, token_file=token_file, marker=bytes(marker))
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    assert driver.stdin is not None
    with driver.stdout, driver.stdin:
        address = driver.stdout.readline().decode().strip()
        with agents(2, address, token_file, everything=True) as started:
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(pids) == 3
            with contextlib.ExitStack() as stack:
                for pid in pids:
                    stack.enter_context(ends(pid))
                driver.kill()
                driver.wait(WAIT_S)
    assert marker.exists()
    assert [agent.returncode for agent in started] == [EXIT_DRIVER_GONE] * 2
